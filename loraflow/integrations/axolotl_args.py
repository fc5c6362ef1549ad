"""The part of Axolotl's config schema that the plugin adds: Axolotl mixes `LoraflowArgs` into its own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.utils.schemas.trl import TRLConfig
from pydantic import BaseModel, field_serializer, model_validator

from loraflow.integrations.axolotl_config import LoraflowSection, resolve, uses_plugin
from loraflow.integrations.axolotl_rules import refusals

__all__ = ["LoraflowArgs"]


class LoraflowArgs(BaseModel):
    """The ``loraflow:`` section, and the refusal of whole configs that loraflow cannot serve.

    Attributes:
        loraflow: Options of `SyncConfig`, and ``servers``. After validation it holds what stood under ``trl:`` too.
    """

    loraflow: LoraflowSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_and_resolve(cls, data: Any) -> Any:
        """Sees the file as it was written: Axolotl drops unknown keys under ``trl:`` later."""
        if not isinstance(data, Mapping) or not uses_plugin(data):
            return data
        found = refusals(data, TRLConfig.model_fields)
        if found:
            raise ValueError("loraflow refuses this config:\n" + "\n".join(f"- {problem}" for problem in found))
        return {**data, "loraflow": resolve(data)}

    @field_serializer("loraflow")
    def _as_given(self, section: LoraflowSection | None) -> dict[str, Any] | None:
        """Only what was given: Axolotl's dump drops nulls, and a dump of defaults would hide what the user chose."""
        return None if section is None else section.model_dump(exclude_unset=True)
