"""From a model's text to reasoning, content and tool calls.

- `OutputParser`: text as it is generated → `Delta`s; every character is in exactly one of reasoning, content and calls, or is a marker.
- `FORMATS`, `detect_format`: the forms in which model families write tool calls, and how a chat template tells which one a model uses.
- `REASONING`, `detect_reasoning`: the markers around a model's reasoning.
"""

from .formats import FORMATS, CallFormat, detect_format
from .json_values import json_end
from .parser import Delta, OutputParser
from .reasoning import REASONING, ReasoningFormat, detect_reasoning, starts_in_reasoning
from .region import CallPiece

__all__ = [
    "FORMATS",
    "REASONING",
    "CallFormat",
    "CallPiece",
    "Delta",
    "OutputParser",
    "ReasoningFormat",
    "detect_format",
    "detect_reasoning",
    "json_end",
    "starts_in_reasoning",
]
