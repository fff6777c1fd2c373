"""Distribution of test files to the worker processes of a run."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# These folders share servers, clients and a Spark session, whose start costs more than most tests. The
# following files in them share nothing.
SHARING = ("interop", "pipeline")
ALONE = {
    "test_attributes.py", "test_expired_stores.py", "test_ledger_stores.py", "test_store_commands.py",
    "test_stores.py",
}  # fmt: skip


# Folders of few files whose tests take seconds each and share nothing: each test may run in any process.
DIVISIBLE = ("simulation",)


class Rooms(LoadScopeScheduling):
    """A scheduler that assigns whole files, or whole folders where their files share servers.

    xdist's own groups have no effect with pytest 9.2: xdist looks for them in the names of tests, which no
    longer contain them.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePath(nodeid.partition("::")[0])
        if path.parts[1] in DIVISIBLE:
            return nodeid
        shares = path.parts[1] in SHARING and path.name not in ALONE
        return str(path.parent if shares else path)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a worker died, if it died in one.

        That test counts as completed. Otherwise each new worker would run it and die, too.
        """
        crashed = None
        for unit in self.assigned_work[node].values():
            crashed = next((test for test, completed in unit.items() if not completed), None)
            if crashed is not None:
                unit[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Assign work to a worker that has collected the tests.

        The successor of a dead worker may not have done so. A worker begins a test only when it knows the
        next one, or that there is none.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            if self.workqueue:
                self._assign_work_unit(node)
            else:
                node.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Rooms | None:
    """Return the scheduler of `make test`."""
    return Rooms(config, log) if config.getvalue("dist") == "loadgroup" else None
