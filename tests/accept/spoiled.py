"""A connector that loads pages wrong, to prove that the acceptance would see it. An engine with it must save
nothing."""

import sys
from collections.abc import Sequence

import torch

from dataplane.staging import TorchPages
from engine_adapters.vllm.connector import UcmConnector


class SpoiledPages(TorchPages):
    """Turns the sign of every float32 of a page, between the check of its bytes and the engine's memory."""

    def scatter_many(self, group: int, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """See Pages."""
        page_bytes = self.groups[group].page_bytes
        spoiled = [bytearray(data[:page_bytes]) for data in datas]
        for page in spoiled:
            torch.frombuffer(page, dtype=torch.float32).neg_()
        super().scatter_many(group, blocks, [memoryview(page) for page in spoiled])


class SpoiledConnector(UcmConnector):
    """As the real one, but for its pages."""


vars(sys.modules[UcmConnector.__module__])["TorchPages"] = SpoiledPages
