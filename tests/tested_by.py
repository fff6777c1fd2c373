"""The test file of each module that has no test file of its own name.

A module `<room>/<sub-room>/<module>.py` has its tests in `tests/<room>/<sub-room>/test_<module>.py` or
`tests/<room>/test_<module>.py`. A module that is tested as a part of something larger is listed here after
its test file, where `store/test_flush.py` is the file of that name anywhere below `tests/store`. `python -m
tests.tested_by` rewrites the table.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "cometmq"

TABLE = """
admin/test_formats.py: admin/admin admin/errors admin/groups admin/message_admin admin/servers admin/stats
    admin/topic_admin admin/values
admin/test_lite.py: broker/admin/lite
broker/test_checks.py: broker/transactions/service
broker/test_client_requests.py: broker/tables/subscription_groups
broker/test_consumers.py: broker/admin/clients
broker/test_decision.py: broker/access/rights
broker/test_dedup.py: broker/send/key_table
broker/test_disagreements.py: broker/groups/subscriptions
broker/test_ending.py: broker/transactions/records
broker/test_lite_topics.py: broker/lite/following broker/lite/pops broker/lite/requests broker/lite/service
    broker/lite/subscriptions
broker/test_modes.py: broker/tables/consume_modes
broker/test_offset_requests.py: broker/base/compat
broker/test_parts.py: broker/server
broker/test_pops.py: broker/pop/checks broker/pop/lease_files broker/pop/polls broker/pop/requests
    broker/pop/retries broker/pop/service
broker/test_progress.py: broker/base/times
broker/test_pull.py: broker/pull/checks
broker/test_purge.py: broker/base/attributes
broker/test_raft_tables.py: broker/tables/versions
broker/test_register.py: broker/base/address
broker/test_relay.py: broker/send/relay
broker/test_replication.py: broker/replication/ha_client broker/replication/ha_server
    broker/replication/raft_wire
broker/test_schedule.py: broker/tables/delay_offsets broker/timers/delivered
broker/test_send.py: broker/base/members broker/base/replies broker/base/retry_records broker/base/writer
    broker/tables/topics
broker/test_settings_requests.py: remoting/addresses
broker/test_standalone.py: broker/leader_services broker_process standalone
broker/test_tiered_storage.py: broker/object_store
broker/test_timers.py: broker/send/timed broker/tables/timer_state broker/timers/following
    broker/timers/redelivery broker/timers/requests
cli/test_archive_command.py: cli/pipeline/job cli/pipeline/reading cli/pipeline/writing
cli/test_client_commands.py: cli/options
cli/test_context.py: contexts
cli/test_lazy.py: cli/app command_options
cli/test_running.py: cli/conf
cli/test_send_input.py: cli/send
cli/test_servers.py: cli/doctor cli/listening cli/operate cli/outcome cli/standalone
cli/test_serving.py: remoting/loop
cli/test_store_commands.py: cli/store
cli/test_watching.py: admin/commands/watching
client/test_agreement.py: client/group/subscription
client/test_blocking.py: client/blocking_client client/loop_thread
client/test_identity.py: client/cluster/options
client/test_odd_answers.py: client/cluster/broker_api protocol/addresses
client/test_producer.py: client/cluster/instance client/cluster/requests client/producer/options
    client/producer/outgoing
client/test_pull.py: client/pull/reading_ahead
client/test_push.py: client/cluster/server_requests client/consumer/concurrent client/consumer/consume_mode
    client/consumer/delivery client/consumer/push_session client/consumer/queue_puller
    client/consumer/rebalance client/consumer/retry_topic client/group/group client/group/member
    client/group/options client/pull/polling client/pull/single_pulls
client/test_retry.py: client/producer/selectors
client/test_simple.py: client/simple/leases client/simple/receiving
console/test_app.py: console/messages/dead_group console/messages/message console/messages/search
    console/messages/timers console/messages/transactions console/pages/access_changes console/widgets/actions
    console/widgets/forms console/widgets/listing console/widgets/page console/widgets/services
console/test_brokers.py: console/pages/name_servers console/pages/overview console/widgets/charts
    console/widgets/settings
console/test_clusters.py: console/base/errors
console/test_gate.py: console/auth/attempts console/auth/http
console/test_groups.py: console/pages/group
console/test_topics.py: console/pages/reset console/pages/topic
faults/test_power_loss.py: testing/history
filtersrv/test_filters.py: filtersrv/worker
grpc/service/test_consumers.py: grpc/service/delivered grpc/service/endpoints grpc/service/outcomes
    grpc/service/receives grpc/service/renewals grpc/service/sessions
grpc/service/test_producers.py: grpc/endpoint grpc/service/routes grpc/service/sends grpc/service/sent
grpc/service/test_traces.py: broker/send/trace_topic
grpc/test_connection.py: grpc/http2/errors grpc/http2/frames grpc/http2/sending
grpc/test_gateway.py: grpc/gateway/exchange grpc/gateway/received grpc/gateway/requests
grpc/test_hpack.py: grpc/http2/huffman
grpc/test_http1.py: grpc/http1/connection
grpc/test_messages.py: grpc/rpc/enums grpc/rpc/status
grpc/test_server.py: grpc/listener/dispatch
grpc/test_strangers.py: grpc/listener/connection
integrations/test_faststream.py: integrations/faststream/annotations integrations/faststream/broker
    integrations/faststream/command integrations/faststream/config integrations/faststream/message
    integrations/faststream/producer integrations/faststream/subscriber
integrations/test_faststream_memory.py: integrations/faststream/opentelemetry
    integrations/faststream/prometheus integrations/faststream/testing
integrations/test_kombu.py: integrations/session
integrations/test_mcp.py: cli/mcp
metrics/test_port.py: metrics/exporter metrics/families metrics/settings
namesrv/test_name_server.py: namesrv/kv namesrv/requests namesrv/server
pipeline/test_archive.py: pipeline/jobs/archive_query pipeline/jobs/dlq_task pipeline/jobs/replay/task
    pipeline/session
pipeline/test_archive_bodies.py: pipeline/table/body_schema
pipeline/test_archive_groups.py: pipeline/table/small_files
pipeline/test_declare.py: pipeline/base/job_options
pipeline/test_lake.py: pipeline/table/delta pipeline/table/formats pipeline/table/iceberg
pipeline/test_replaced_queues.py: pipeline/live/marks
pipeline/test_sink.py: pipeline/sink/rows
pipeline/test_task.py: pipeline/table/partition_writer
pipeline/test_unwilling_brokers.py: pipeline/base/errors pipeline/base/offsets pipeline/base/wire
    pipeline/live/cluster pipeline/live/reading pipeline/sink/bad_rows
protocol/test_arrow.py: protocol/properties/columns
protocol/test_bodies.py: protocol/batch protocol/bodies/admin protocol/bodies/client protocol/bodies/route
    protocol/json_body protocol/lite
protocol/test_frame.py: protocol/binary_header
protocol/test_headers.py: protocol/codes protocol/ext protocol/headers/admin protocol/headers/client
    protocol/headers/message protocol/headers/namesrv
protocol/test_one.py: protocol/checksum protocol/record/layout
protocol/test_sql.py: protocol/sql/grammar protocol/sql/java_values
protocol/test_values.py: protocol/properties/key_hashes
raft/test_node.py: raft/leading raft/members
remoting/test_bounds.py: remoting/limits
remoting/test_server.py: remoting/connection remoting/dispatch remoting/housekeeping remoting/peer
remoting/test_tls.py: remoting/opening
store/test_apache_store.py: store/derived/index_file
store/test_batch_items.py: store/base/refusal
store/test_faults.py: store/base/disk
store/test_flush.py: store/background/derived_writer store/background/upkeep
store/test_lengths.py: store/tables/clean_stop
store/test_log_ends.py: store/raft_log/member_files
store/test_model.py: store/message_store
store/test_queue_reader.py: store/log/recent
store/test_raft_log.py: protocol/record/framing store/raft_log/entry_index
store/test_record_finder.py: store/inspect/stats store/log/log_reader
store/test_recovery.py: store/base/checkpoint store/base/guards store/log/scan store/recovery/recovery_scan
    store/writing/queue_order
store/test_retention.py: store/background/fullness
store/test_settings.py: store/base/config
store/test_syncer.py: store/log/sync_child
store/test_topic_deletion.py: store/tables/deleted_topics
store/test_topic_retention.py: store/tables/min_offsets
store/test_uncached_reads.py: store/base/files
store/test_uploads.py: store/tables/tiered_segments store/tiered/layout
store/test_verify.py: store/inspect/findings store/inspect/log_walk
store/test_verify_derived.py: store/inspect/index_check store/inspect/queue_check store/inspect/unit_files
store/test_writing.py: store/derived/consume_queue store/derived/index_service store/derived/queue_table
    store/log/commit_log store/writing/dispatch store/writing/log_cut store/writing/record_dispatch
test_periodic.py: clock
testing/test_in_memory.py: remoting/memory
testing/test_plugin.py: testing/local testing/process
testing/test_proxy.py: testing/faults
"""


def read(table: str) -> dict[str, str]:
    """Parse a table of lines `test file: module module ...`; return the test file by module."""
    lines = [line.partition(":") for line in table.replace("\n    ", " ").strip().splitlines()]
    return {f"{module}.py": test for test, _, modules in lines for module in modules.split()}


TESTED_BY = read(TABLE)


def modules() -> Iterator[Path]:
    """Yield the relative path of every module in the package that contains code."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            yield path.relative_to(PACKAGE)


def own_tests(module: Path) -> list[Path]:
    """Return the test files with a module's name.

    They are beside its neighbours' tests or directly in the room; for a module directly in the room, anywhere
    in it.
    """
    name = f"test_{module.name}"
    if len(module.parts) == 2:
        return list((TESTS / module.parts[0]).rglob(name))
    homes = {TESTS / module.parent, TESTS / module.parts[0]} if len(module.parts) > 1 else {TESTS}
    return [path for home in homes if (path := home / name).exists()]


def found(name: str) -> list[Path]:
    """Return the test files that an entry of the table may mean."""
    room, _, file = name.rpartition("/")
    if not file:
        return []
    return sorted((TESTS / room).rglob(file)) if room else sorted(TESTS.glob(file))


def suggestion(module: Path) -> str:
    """Return the test file that tests most of a module's neighbours."""
    beside = Counter(
        test for name, test in TESTED_BY.items() if Path(name).parent == module.parent and found(test)
    )
    return beside.most_common(1)[0][0] if beside else ""


def wanted() -> dict[str, str]:
    """Return the correct table: the modules that need an entry, with their current test files if these exist.

    A module that has moved within its room keeps its test file.
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
    """Write the table into this file. A module without a suggestion gets no test file, so the test fails."""
    by_test: dict[str, list[str]] = {}
    for module, test in wanted().items():
        by_test.setdefault(test, []).append(module.removesuffix(".py"))
    lines = [f"{test}: {' '.join(names)}" for test, names in sorted(by_test.items())]
    wrapped = [textwrap.fill(line, 110, subsequent_indent="    ", break_on_hyphens=False) for line in lines]
    head, opening, rest = Path(__file__).read_text("utf-8").partition('TABLE = """\n')
    tail = rest.partition('"""\n')[2]
    Path(__file__).write_text(head + opening + "\n".join(wrapped) + '\n"""\n' + tail, "utf-8")


if __name__ == "__main__":
    main()
