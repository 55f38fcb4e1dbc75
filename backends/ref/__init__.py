"""ref: every core op in numpy. The definition that other backends are compared with, the last fallback, and the class that new
backends inherit from until their own ops are written."""
