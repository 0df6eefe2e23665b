"""Dialects: how families of models write reasoning and tool calls, read as it grows and bound by grammars. No torch."""
