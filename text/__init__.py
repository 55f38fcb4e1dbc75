"""fastllm.text: between people's text and the model's token ids.

- `Tokenizer`: text ↔ ids as the model's own tokenizer has them, from GGUF metadata, tokenizer.json or tokenizer.model.
- `IncrementalDetokenizer`: ids → text while they are generated, complete characters only, stop strings found and removed.
- `ChatTemplate` → `RenderedPrompt`: messages → the prompt of the model's template, in a sandbox and under a budget, each
  character marked as the template's or the client's, so that a marker a client types stays text.

- `output.OutputParser`: generated text → reasoning, content and tool calls, for a dozen families.
- `grammar.GrammarCompiler`: JSON schema, regex, grammar → masks over the vocabulary. Not imported here: its library loads when it is used.

A chat prompt: `tokenizer.encode_parts(template.render(messages).parts)`. This room imports nothing of fastllm but the errors.
"""

from .detokenizer import IncrementalDetokenizer
from .template import ChatTemplate, RenderedPrompt, check_messages
from .tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "RenderedPrompt", "Tokenizer", "check_messages"]
