"""The messages of a chat and the commands that change them."""

from __future__ import annotations

__all__ = ("HELP", "Conversation")

HELP = "/reset, /system TEXT, /exit; Ctrl-C stops an answer"


class Conversation:
    """A system message, if any, followed by questions and answers."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.is_finished = False

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def add_question(self, text: str) -> list[dict[str, str]]:
        """Add a question and return all messages."""
        self.turns.append({"role": "user", "content": text})
        return self.messages()

    def add_answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def drop_question(self) -> None:
        """Remove the last question, which could not be answered."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def command(self, line: str) -> str | None:
        """Run ``/command``. Return the text to print, or ``None`` for a question or ``/exit``."""
        word, _, rest = line.partition(" ")
        match word:
            case "/exit" | "/quit":
                self.is_finished = True
                return None
            case "/reset":
                self.turns.clear()
                return "(forgotten)"
            case "/system":
                self.system = rest.strip() or None
                return f"(system message: {self.system or 'none'})"
            case "/help":
                return HELP
        if word.startswith("/") and "/" not in word[1:]:
            return f"there is no command {word}; {HELP}"
        return None
