"""What vLLM's programs call between two engines."""

import gc

__all__ = ("cleanup_dist_env_and_memory",)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that are not referred to any more; they have ended by themselves."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
