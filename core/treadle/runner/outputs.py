"""Outputs of a step in flight, copied to the CPU side asynchronously."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import ModelRunnerOutput, TokenLogprobs
from treadle.sampling.logprobs import Logprobs

__all__ = ("InFlightOutput", "flag_invalid")


def flag_invalid(tokens: Tensor, invalid: Tensor) -> Tensor:
    """Return ``tokens`` with negative values where ``invalid``, to copy one tensor instead of two."""
    return torch.add(tokens, invalid, alpha=-(1 << 40))


class InFlightOutput:
    """A launched step. The copies to the CPU side are enqueued; ``result`` waits for them.

    The copies are in the step's stream: while another stream waits for the step, each kernel of a
    CUDA graph starts 0.3 us later.
    """

    def __init__(self, step_id: int, device: torch.device) -> None:
        self._id = step_id
        self.histories: list[list[int] | None] = []
        """Of the sampled rows: the ids that a logits processor sees, which gain a token each."""
        self._rows: list[int] = []
        self._tokens: Tensor | None = None
        self._logprobs: Logprobs | None = None
        self._prompts: list[tuple[int, Logprobs]] = []
        self.row_errors: dict[int, str] = {}
        """Errors of logits processors, by index into the tokens."""
        self.is_edited: dict[int, list[str]] = {}
        """Names of the logits processors that have edited a row, by index into the tokens."""
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def sampled(self, rows: list[int], tokens: Tensor, logprobs: Logprobs | None = None) -> None:
        """Start copying ``tokens`` (see ``flag_invalid``) of ``rows`` of the scheduler output."""
        self._rows = rows
        # torch copies to pinned memory if the copy is non-blocking; on a CPU the call alone takes 20 us.
        self._tokens = tokens if tokens.is_cpu else tokens.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.cpu()

    def prompt(self, row: int, logprobs: Logprobs) -> None:
        self._prompts.append((row, logprobs.cpu()))

    def record(self) -> None:
        """Record the end of the step, after all its work has been enqueued."""
        if self._event is not None:
            self._event.record()

    def result(self, compilations: int) -> ModelRunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            rows = (self._rows[i] for i in self._logprobs.rows)
            logprobs = dict(zip(rows, self._logprobs.to_host(), strict=True))
        tokens: list[int] = self._tokens.tolist() if self._tokens is not None else []
        invalid_rows = [i for i, token in enumerate(tokens) if token < 0]
        return ModelRunnerOutput(
            id=self._id,
            sampled_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs={row: values.to_host() for row, values in self._prompts},
            invalid_rows=sorted({*invalid_rows, *self.row_errors}),
            row_errors=self.row_errors,
            compilations=compilations,
        )
