"""Which tests run in one worker, so that what they share is made once: checkpoints, adapters, answers, servers."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

from tests.families.build import ALL_FAMILIES

SHARING_FOLDERS = ("tests/server/", "tests/cli/")
"""Their tests share a server, or an engine."""


def group_of(nodeid: str) -> str:
    """The family that a test is for, if there is one; else its folder or file.

    Told from the test's id: xdist's own groups (marks, `--dist loadgroup`) are not seen by pytest 9.2.
    """
    path, _, rest = nodeid.partition("::")
    parameters = re.findall(r"[\w.]+", rest.partition("[")[2])
    families = [name for name in parameters if name in ALL_FAMILIES]
    if families:
        return families[0]
    return next((folder for folder in SHARING_FOLDERS if path.startswith(folder)), path)


class Groups(LoadScopeScheduling):
    """Large groups first, each to whichever worker has the least left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
