"""Conversations as text: the model's own chat template, rendered so that nobody can type control tokens into it."""

from llamaspec.chat.templates import ChatTemplate, Message, Piece, Rendered

__all__ = ["ChatTemplate", "Message", "Piece", "Rendered"]
