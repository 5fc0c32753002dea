"""The processes of a run on several machines, started by torchrun: values, tensors and checkpoints go round (gloo)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from roundpipe_cli.events import Say
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.nodes.agreement import recipe_facts
from roundpipe_cli.train.nodes.waiting import Waiting, stores

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)}


def _silent(text: str) -> None:
    return None


class Nodes:
    """The processes of a run, as a context manager. A single process sends nothing and gets its own values back."""

    def __init__(self, rank: int = 0, count: int = 1, say: Say = _silent) -> None:
        """
        Args:
            rank: of this process.
            count: of processes.
            say: gets lines about the other machines.
        """
        self.rank, self.count = rank, count
        self.waiting = Waiting(rank, count, say)
        self._weights: Any = None
        self._state: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def __enter__(self) -> Nodes:
        self.waiting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.__exit__(kind, error, trace)
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def meet(self, recipe: Recipe) -> None:
        """Find the other processes; see `Waiting.meet`. Before anything else that is named here.

        Raises:
            NodeLostError: one does not come.
            RecipeError: their recipes must not be trained together.
        """
        if self.count == 1:
            return
        self.waiting.meet(recipe_facts(recipe), recipe.watchdog_s)
        store, timeout = stores.PrefixStore("gloo", self.waiting.store), self.waiting.timeout

        def connect() -> None:
            dist.init_process_group("gloo", store=store, timeout=timeout, rank=self.rank, world_size=self.count)

        self.waiting.run(connect, "to connect")

    def check_same(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Refuse to train together on different things.

        Raises:
            RecipeError: see `require_same`.
        """
        if self.count > 1:
            self.waiting.compare(facts())

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, in float64, with equal bits on each."""
        return [float(value) for value in self._reduced(values, torch.float64, dist.ReduceOp.SUM)]

    def most(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over all processes."""
        return [int(value) for value in self._reduced(values, torch.int64, dist.ReduceOp.MAX)]

    def _reduced(self, values: Sequence[float], dtype: torch.dtype, operation: Any) -> list[float]:
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=dtype)
        self.waiting.run(lambda: dist.all_reduce(tensor, operation), "a step's border")
        return list(tensor.tolist())

    def add_up(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """Replace a host tensor by its sum over all processes; the bits are the same on each.

        Args:
            owner: the only process that wants it; elsewhere the tensor is left with anything in it.
        """
        if owner is None:
            self.waiting.run(lambda: dist.all_reduce(tensor), "summing gradients")
        else:
            self.waiting.run(lambda: dist.reduce(tensor, owner), "summing gradients")

    def open_links(self) -> None:
        """Make `share`, `send_to_first` and `receive_like` possible; on all processes."""
        self._weights, self._state = (dist.new_group(timeout=self.waiting.timeout) for _ in range(2))

    def share(self, tensor: torch.Tensor, owner: int) -> None:
        """Replace a contiguous host tensor by its owner's. May run beside calls of other methods."""
        content = tensor.view(torch.uint8)
        self.waiting.run(lambda: dist.broadcast(content, owner, group=self._weights), "sending new weights round")

    def send_to_first(self, tensor: torch.Tensor) -> None:
        """Send a contiguous host tensor to the first process, which calls `receive_like`."""
        content = tensor.reshape(-1).view(torch.uint8)
        if content.numel():
            self.waiting.run(lambda: dist.send(content, 0, group=self._state), "collecting a checkpoint")

    def receive_like(self, tensor: torch.Tensor, sender: int) -> torch.Tensor:
        """The tensor that `sender` sends, of the shape and type of `tensor`."""
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        content = received.view(-1).view(torch.uint8)
        if content.numel():
            self.waiting.run(lambda: dist.recv(content, sender, group=self._state), "collecting a checkpoint")
        return received

    def from_first(self, document: Any) -> Any:
        """The first process' JSON document, on all."""
        if self.count == 1:
            return document
        content = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.waiting.run(lambda: dist.broadcast(size, 0), "the first process' word")
        if not self.is_first:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.waiting.run(lambda: dist.broadcast(content, 0), "the first process' word")
        return json.loads(bytes(content.numpy()))

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """The first process' checkpoint, on all; the others need not see its files."""
        if self.count == 1:
            return checkpoint
        head = None
        if self.is_first and checkpoint is not None:
            groups = {group: _shapes(checkpoint.tensors(group)) for group in checkpoint.groups}
            head = {
                "folder": str(checkpoint.folder),
                "step": checkpoint.step,
                "meta": checkpoint.meta,
                "groups": groups,
            }
        head = self.from_first(head)
        if head is None:
            return None
        received: dict[str, dict[str, torch.Tensor]] = {}
        for group, shapes in head["groups"].items():
            mine = checkpoint.tensors(group) if self.is_first and checkpoint is not None else None
            received[group] = {}
            for name, (dtype, shape) in shapes.items():
                tensor = torch.empty(shape, dtype=DTYPES[dtype]) if mine is None else mine[name].contiguous()
                self.waiting.run(lambda tensor=tensor: dist.broadcast(tensor, 0), "the checkpoint")  # type: ignore[misc]
                if mine is None:
                    received[group][name] = tensor
        if self.is_first:
            return checkpoint
        return _Received(Path(head["folder"]), head["step"], head["meta"], tuple(head["groups"]), received)


@dataclass(frozen=True)
class _Received(Checkpoint):
    """A checkpoint that came from the first process."""

    content: dict[str, dict[str, torch.Tensor]]

    def tensors(self, group: str) -> Any:
        return self.content[group]


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensors[name].dtype), list(tensors[name].shape)) for name in tensors}
