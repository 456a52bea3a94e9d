"""Every kind of damage."""

from __future__ import annotations

from mutations.byte_damage import BYTE_DAMAGE
from mutations.document_damage import DOCUMENT_DAMAGE
from mutations.file_damage import FILE_DAMAGE
from mutations.kinds import Damage
from mutations.model_damage import MODEL_DAMAGE
from mutations.plain_damage import PLAIN_DAMAGE
from mutations.scale_damage import SCALE_DAMAGE

DAMAGE: dict[str, Damage] = {
    row.name: row for row in (*BYTE_DAMAGE, *SCALE_DAMAGE, *PLAIN_DAMAGE, *MODEL_DAMAGE, *FILE_DAMAGE, *DOCUMENT_DAMAGE)
}
