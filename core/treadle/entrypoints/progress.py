"""The progress bar of offline generation."""

from __future__ import annotations

import time

from tqdm import tqdm

from treadle.outputs import RequestOutput

__all__ = ("Progress",)


class Progress:
    """Counts finished requests and says how fast tokens come. Shows nothing if not ``use_tqdm``."""

    def __init__(self, total: int, use_tqdm: bool) -> None:
        self._bar = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not use_tqdm
        )
        self._start_time = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0

    def feed(self, output: RequestOutput) -> None:
        """Take a finished output."""
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.perf_counter() - self._start_time, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_prompt_tokens / seconds:.1f} tok/s, output: {self._num_output_tokens / seconds:.1f} tok/s",
            refresh=False,
        )
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
