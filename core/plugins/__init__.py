"""How backends are found, loaded, chosen and opened.

`BackendRegistry` is all that the engine and the command line use. Discovery imports nothing; a plug-in is imported when it is
named, or when `auto` has to know every candidate, and asked in a child process until it is the one to open; each has a pluggy manager
of its own, so that no plug-in can answer, wrap or end a call that was meant for another. A plug-in that fails is a state and an error
with an owner, never a traceback.

    config      plugins.toml: layers, checks, file and line of every value
    discovery   entry points of the group `fastllm.backends`, without an import
    entries     filters, and names that two distributions claim
    hookspecs   the hooks a plug-in implements, and the version rule
    loader      guarded import, registration and calls of one plug-in
    put_back    what a plug-in must not change of the process
    report      errors, states and the options of a backend, as users see them
    asking      what becomes of a backend that is asked: loaded, probed, its hooks called
    registry    which backend a run gets
    contained   who is asked in a child process, and what is kept of the answer
    child       questions to plug-ins in child processes, which may crash or hang
"""

from __future__ import annotations

from .child import Answer, ChildProbe, located, probe_in_child, probe_in_children
from .config import PluginsConfig, load_config
from .hookspecs import check_api
from .registry import BackendRegistry, Selection
from .report import BackendState

__all__ = [
    "Answer",
    "BackendRegistry",
    "BackendState",
    "ChildProbe",
    "PluginsConfig",
    "Selection",
    "check_api",
    "load_config",
    "located",
    "probe_in_child",
    "probe_in_children",
]
