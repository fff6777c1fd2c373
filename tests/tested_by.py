"""Which test file tests a module that has none of its own name.

A module `<room>/<sub-room>/<module>.py` has its tests in `tests/<room>/<sub-room>/test_<module>.py` or
`tests/<room>/test_<module>.py`. One that is tested as a part of something larger has its line here, where
`store/test_flush.py` is the file of that name anywhere below `tests/store`. The table is written anew by
`python -m tests.tested_by`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "cometmq"

# fmt: off
TESTED_BY = {
    "admin/admin.py": "admin/test_topic_commands.py",
    "admin/commands.py": "admin/test_shell.py",
    "admin/consumer_commands.py": "admin/test_cluster_commands.py",
    "admin/errors.py": "admin/test_topic_commands.py",
    "admin/groups.py": "admin/test_cluster_commands.py",
    "admin/messages.py": "admin/test_message_commands.py",
    "admin/values.py": "admin/test_formats.py",
    "broker/base/address.py": "broker/test_register.py",
    "broker/base/attributes.py": "broker/test_purge.py",
    "broker/base/compat.py": "broker/test_offset_requests.py",
    "broker/base/inert.py": "broker/test_config.py",
    "broker/base/replies.py": "broker/test_send.py",
    "broker/base/times.py": "broker/test_progress.py",
    "broker/base/writer.py": "broker/test_send.py",
    "broker/groups/notices.py": "broker/test_client_requests.py",
    "broker/process.py": "broker/test_standalone.py",
    "broker/pull/checks.py": "broker/test_pull.py",
    "broker/pull/offset_moved.py": "broker/test_roles.py",
    "broker/server.py": "broker/test_config.py",
    "broker/tables/delay_offsets.py": "broker/test_schedule.py",
    "broker/tables/subscription_groups.py": "broker/test_client_requests.py",
    "broker/tables/topics.py": "broker/test_send.py",
    "cli/app.py": "cli/test_client_commands.py",
    "cli/archive.py": "cli/test_archive_command.py",
    "cli/consume.py": "cli/test_client_commands.py",
    "cli/lazy.py": "cli/test_servers.py",
    "cli/options.py": "cli/test_client_commands.py",
    "cli/outcome.py": "cli/test_servers.py",
    "cli/progress.py": "cli/test_store_commands.py",
    "cli/send.py": "cli/test_send_input.py",
    "cli/shutdown.py": "cli/test_servers.py",
    "cli/standalone.py": "cli/test_servers.py",
    "cli/store.py": "cli/test_store_commands.py",
    "client/cluster/broker_api.py": "client/test_odd_answers.py",
    "client/cluster/instance.py": "client/test_producer.py",
    "client/cluster/namesrv_api.py": "client/test_routes.py",
    "client/cluster/options.py": "client/test_identity.py",
    "client/cluster/requests.py": "client/test_producer.py",
    "client/cluster/server_requests.py": "client/test_push.py",
    "client/cluster/workers.py": "client/test_pull.py",
    "client/consumer/acknowledging.py": "client/test_push.py",
    "client/consumer/group.py": "client/test_push.py",
    "client/consumer/options.py": "client/test_push.py",
    "client/consumer/push_session.py": "client/test_push.py",
    "client/consumer/queue_puller.py": "client/test_push.py",
    "client/consumer/reading_ahead.py": "client/test_pull.py",
    "client/consumer/subscription.py": "client/test_push.py",
    "client/loop_thread.py": "client/test_blocking.py",
    "client/producer/options.py": "client/test_producer.py",
    "client/producer/outgoing.py": "client/test_producer.py",
    "logs.py": "test_text.py",
    "namesrv/kv.py": "namesrv/test_name_server.py",
    "namesrv/requests.py": "namesrv/test_name_server.py",
    "namesrv/server.py": "namesrv/test_name_server.py",
    "pipeline/archive_query.py": "pipeline/test_archive.py",
    "pipeline/cluster.py": "pipeline/test_unwilling_brokers.py",
    "pipeline/errors.py": "pipeline/test_unwilling_brokers.py",
    "pipeline/marks.py": "pipeline/test_replaced_queues.py",
    "pipeline/offsets.py": "pipeline/test_plan.py",
    "pipeline/partition_writer.py": "pipeline/test_archive_task.py",
    "pipeline/reading.py": "pipeline/test_unwilling_brokers.py",
    "pipeline/requests.py": "pipeline/test_unwilling_brokers.py",
    "pipeline/rows.py": "pipeline/test_sink.py",
    "pipeline/session.py": "pipeline/test_source.py",
    "pipeline/watch.py": "pipeline/test_archive.py",
    "pipeline/wire.py": "pipeline/test_unwilling_brokers.py",
    "protocol/addresses.py": "client/test_odd_answers.py",
    "protocol/binary_header.py": "protocol/test_frame.py",
    "protocol/bodies_admin.py": "protocol/test_bodies.py",
    "protocol/bodies_client.py": "protocol/test_bodies.py",
    "protocol/bodies_route.py": "protocol/test_bodies.py",
    "protocol/ext.py": "protocol/test_headers.py",
    "protocol/headers_admin.py": "protocol/test_headers.py",
    "protocol/headers_client.py": "protocol/test_headers.py",
    "protocol/headers_message.py": "protocol/test_headers.py",
    "protocol/headers_namesrv.py": "protocol/test_headers.py",
    "protocol/json_body.py": "protocol/test_bodies.py",
    "protocol/properties/columns.py": "protocol/test_arrow.py",
    "protocol/send_ext.py": "protocol/test_frame.py",
    "remoting/addresses.py": "broker/test_settings_requests.py",
    "remoting/connection.py": "remoting/test_server.py",
    "remoting/dispatch.py": "remoting/test_server.py",
    "remoting/housekeeping.py": "remoting/test_server.py",
    "remoting/limits.py": "remoting/test_bounds.py",
    "remoting/loop.py": "cli/test_serving.py",
    "remoting/partial.py": "remoting/test_bounds.py",
    "standalone.py": "broker/test_standalone.py",
    "store/background/checkpointing.py": "store/test_flush.py",
    "store/background/derived_writer.py": "store/test_flush.py",
    "store/background/fullness.py": "store/test_retention.py",
    "store/background/purge.py": "store/test_topic_retention.py",
    "store/background/space_ahead.py": "store/test_full_disk.py",
    "store/background/upkeep.py": "store/test_flush.py",
    "store/base/checkpoint.py": "store/test_recovery.py",
    "store/base/config.py": "store/test_settings.py",
    "store/base/disk.py": "store/test_faults.py",
    "store/base/files.py": "store/test_cold_reads.py",
    "store/base/flags.py": "store/test_settings.py",
    "store/base/guards.py": "store/test_recovery.py",
    "store/base/read_only_files.py": "store/test_strange_files.py",
    "store/base/refusal.py": "store/test_batch_items.py",
    "store/derived/consume_queue.py": "store/test_writing.py",
    "store/derived/gaps.py": "store/test_fillers.py",
    "store/derived/index_file.py": "store/test_apache_store.py",
    "store/derived/index_service.py": "store/test_writing.py",
    "store/derived/queue_table.py": "store/test_writing.py",
    "store/inspect/evidence.py": "store/test_verify_derived.py",
    "store/inspect/find.py": "store/test_find_and_stats.py",
    "store/inspect/findings.py": "store/test_verify.py",
    "store/inspect/index_check.py": "store/test_verify_derived.py",
    "store/inspect/index_files.py": "store/test_verify_derived.py",
    "store/inspect/log_walk.py": "store/test_verify.py",
    "store/inspect/queue_check.py": "store/test_verify_derived.py",
    "store/inspect/stats.py": "store/test_find_and_stats.py",
    "store/inspect/unit_files.py": "store/test_verify_derived.py",
    "store/log/block_cache.py": "store/test_queue_reader.py",
    "store/log/commit_log.py": "store/test_writing.py",
    "store/log/log_reader.py": "store/test_find_and_stats.py",
    "store/log/recent.py": "store/test_queue_reader.py",
    "store/log/scan.py": "store/test_recovery.py",
    "store/log/sync_child.py": "store/test_syncer.py",
    "store/message_store.py": "store/test_model.py",
    "store/recovery/queue_order.py": "store/test_recovery.py",
    "store/recovery/recovered.py": "store/test_recovery.py",
    "store/recovery/replay.py": "store/test_recovery.py",
    "store/recovery/segments.py": "store/test_recovery.py",
    "store/recovery/start_point.py": "store/test_recovery.py",
    "store/recovery/store_layout.py": "store/test_verify.py",
    "store/tables/clean_stop.py": "store/test_lengths.py",
    "store/tables/deleted_topics.py": "store/test_topic_deletion.py",
    "store/tables/min_offsets.py": "store/test_topic_retention.py",
    "store/tables/table_text.py": "store/test_json_table.py",
    "store/writing/batch_appender.py": "store/test_batch_items.py",
    "store/writing/dispatch.py": "store/test_writing.py",
    "testing/crash_images.py": "faults/test_power_loss.py",
    "testing/faulty_disk.py": "store/test_faults.py",
    "testing/local.py": "testing/test_plugin.py",
    "testing/process.py": "testing/test_plugin.py",
    "testing/recording_disk.py": "faults/test_power_loss.py",
}
# fmt: on


def modules() -> Iterator[Path]:
    """Every module of the package that holds code of its own, below the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            yield path.relative_to(PACKAGE)


def own_tests(module: Path) -> list[Path]:
    """The test files of a module's own name, where they may lie."""
    homes = {TESTS / module.parent, TESTS / module.parts[0]} if len(module.parts) > 1 else {TESTS}
    return [path for home in homes if (path := home / f"test_{module.name}").exists()]


def found(name: str) -> list[Path]:
    """The test files that an entry of the table may mean."""
    room, _, file = name.rpartition("/")
    if not file:
        return []
    return sorted((TESTS / room).rglob(file)) if room else sorted(TESTS.glob(file))


@cache
def imported() -> dict[str, list[tuple[str, str]]]:
    """Test file -> (module, name) of what it imports from the package."""
    files = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        room = path.relative_to(TESTS).parts[0]
        files[path.name if room == path.name else f"{room}/{path.name}"] = [
            (node.module or "", alias.name) for node in nodes for alias in node.names
        ]
    return files


def suggestion(module: Path) -> str:
    """The test file that imports most of a module, first of its own room; else that of its neighbours."""
    dotted = ".".join(("cometmq", *module.with_suffix("").parts))
    defined = {getattr(node, "name", "") for node in ast.parse((PACKAGE / module).read_text("utf-8")).body}
    room = module.parts[0]
    for files in ([name for name in imported() if name.startswith(f"{room}/")], list(imported())):
        asked = Counter(
            name
            for name in files
            for home, what in imported()[name]
            if f"{home}.{what}" == dotted or (home.startswith("cometmq") and what in defined)
        )
        if asked:
            return asked.most_common(1)[0][0]
    beside = Counter(
        test for name, test in TESTED_BY.items() if Path(name).parent == module.parent and found(test)
    )
    return beside.most_common(1)[0][0] if beside else ""


def wanted() -> dict[str, str]:
    """The table as it must be: the lines that are needed, those of today where they still hold.

    A module that has moved within its room keeps its line.
    """
    known = list(modules())
    moved = {
        (name.split("/")[0], Path(name).name): test
        for name, test in TESTED_BY.items()
        if Path(name) not in known
    }
    table = {}
    for module in known:
        if not own_tests(module):
            name = module.as_posix()
            today = TESTED_BY.get(name) or moved.get((module.parts[0], module.name), "")
            table[name] = today if len(found(today)) == 1 else suggestion(module)
    return table


def main() -> None:
    """Write the table into this file. What nobody can guess stays empty, which the test refuses."""
    head, _, rest = Path(__file__).read_text("utf-8").partition("TESTED_BY = {\n")
    lines = "".join(f'    "{module}": "{test}",\n' for module, test in wanted().items())
    _, _, tail = rest.partition("}\n")
    Path(__file__).write_text(head + "TESTED_BY = {\n" + lines + "}\n" + tail, "utf-8")


if __name__ == "__main__":
    main()
