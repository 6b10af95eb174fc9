"""Hugging Face accelerate: ``state_of(accelerator)`` is a state for ``ckpt.save`` and ``ckpt.restore``."""

from __future__ import annotations

from typing import Any

from tierfall.errors import ConfigError

__all__ = ["state_of"]


def state_of(accelerator: Any) -> dict[str, Any]:
    """Return what an Accelerator has prepared and registered, as a state for ``ckpt.save`` and ``ckpt.restore``.

    Entries: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``loader`` (a StatefulDataLoader), ``custom``; a
    second model has the number 1 appended to its name. Raises ConfigError with DeepSpeed.
    """
    if accelerator.distributed_type == "DEEPSPEED":
        raise ConfigError("state_of: DeepSpeed trains: use tierfall.integrations.deepspeed")
    loaders = [x for x in accelerator._dataloaders if getattr(x, "use_stateful_dataloader", False)]
    found: dict[str, list[Any]] = {
        "model": [*map(weights_of, accelerator._models)],
        "optimizer": [x.optimizer for x in accelerator._optimizers],
        "scheduler": [x.scheduler for x in accelerator._schedulers],
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        "loader": loaders,
        "custom": accelerator._custom_objects,
    }
    return {
        f"{k}_{n}" if n else k: x for k, several in found.items() for n, x in enumerate(several)
    }


def weights_of(model: Any) -> Any:
    """Return the parameters of a model that are saved: with PEFT adapters, those that are trained."""
    if not hasattr(model, "peft_config"):
        return model
    trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    return {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in trained}
