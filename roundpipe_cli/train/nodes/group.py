"""Several machines, one process on each, started by torchrun: a step's microbatches are shared, gradients are summed.

Each process runs an engine of its own over its own devices and holds all weights. Gradients land in host memory anyway;
a thread sums a layer's over all processes (gloo) as soon as the layer is complete, beside the backward of the others.
All processes then make the same update. The first process writes metrics, checkpoints and the result.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.gradients import square_sum
from roundpipe_cli.engine.options import OnGradient
from roundpipe_cli.engine.step import Microbatch, Part, StepResult
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import NodeLostError, RefusedError, RoundpipeError
from roundpipe_cli.model.head import target_rows
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.nodes.processes import check_processes

LONGEST_WAIT = timedelta(days=1)
"""Longest wait for the other processes where `watchdog_s` is 0."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)}


class Nodes:
    """The processes of a run, as a context manager. A single process sends nothing and gets its own values back."""

    def __init__(self, rank: int, count: int, watchdog_s: float) -> None:
        """
        Args:
            rank: of this process.
            count: of processes.
            watchdog_s: how long to wait for the others at one place; 0 is a day.
        """
        self.rank, self.count = rank, count
        self._timeout = timedelta(seconds=watchdog_s) if watchdog_s else LONGEST_WAIT
        self._weights: Any = None
        self._state: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def __enter__(self) -> Nodes:
        if self.count > 1:
            self._try(lambda: dist.init_process_group("gloo", timeout=self._timeout), "finding the other processes")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

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
        self._try(lambda: dist.all_reduce(tensor, operation), "a step's border")
        return list(tensor.tolist())

    def add_up(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """Replace a host tensor by its sum over all processes; the bits are the same on each.

        Args:
            owner: the only process that wants it; elsewhere the tensor is left with anything in it.
        """
        if owner is None:
            self._try(lambda: dist.all_reduce(tensor), "summing gradients")
        else:
            self._try(lambda: dist.reduce(tensor, owner), "summing gradients")

    def open_links(self) -> None:
        """Make `share`, `send_to_first` and `receive_like` possible; on all processes."""
        self._weights, self._state = (dist.new_group(timeout=self._timeout) for _ in range(2))

    def share(self, tensor: torch.Tensor, owner: int) -> None:
        """Replace a contiguous host tensor by its owner's. May run beside calls of other methods."""
        content = tensor.view(torch.uint8)
        self._try(lambda: dist.broadcast(content, owner, group=self._weights), "sending new weights round")

    def send_to_first(self, tensor: torch.Tensor) -> None:
        """Send a contiguous host tensor to the first process, which calls `receive_like`."""
        content = tensor.reshape(-1).view(torch.uint8)
        if content.numel():
            self._try(lambda: dist.send(content, 0, group=self._state), "collecting a checkpoint")

    def receive_like(self, tensor: torch.Tensor, sender: int) -> torch.Tensor:
        """The tensor that `sender` sends, of the shape and type of `tensor`."""
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        content = received.view(-1).view(torch.uint8)
        if content.numel():
            self._try(lambda: dist.recv(content, sender, group=self._state), "collecting a checkpoint")
        return received

    def from_first(self, document: Any) -> Any:
        """The first process' JSON document, on all."""
        if self.count == 1:
            return document
        content = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._try(lambda: dist.broadcast(size, 0), "the first process' word")
        if not self.is_first:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._try(lambda: dist.broadcast(content, 0), "the first process' word")
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
                self._try(lambda tensor=tensor: dist.broadcast(tensor, 0), "the checkpoint")  # type: ignore[misc]
                if mine is None:
                    received[group][name] = tensor
        if self.is_first:
            return checkpoint
        return _Received(Path(head["folder"]), head["step"], head["meta"], tuple(head["groups"]), received)

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse to train together on different things.

        Raises:
            RefusedError: on every process whose facts are not the first one's, and on the first.
        """
        theirs = self.from_first(dict(facts))
        mine = json.loads(json.dumps(dict(facts)))
        others = [key for key in mine if mine[key] != theirs.get(key)]
        num_different = self.most([len(others)])[0]
        if num_different:
            raise RefusedError(
                "the processes of this run do not train the same",
                found=f"other than on the first: {', '.join(others)}" if others else "see the other processes' errors",
                expected="the same recipe, data, tokenizer, model and version on every machine",
            )

    def _try(self, collective: Callable[[], Any], what: str) -> None:
        try:
            collective()
        except RuntimeError as error:  # torch raises this for a lost peer, a timeout and a refused connection
            first_line = str(error).strip().partition("\n")[0][:200]
            raise NodeLostError(
                f"another process of this run ended or cannot be reached: {what}",
                where=f"process {self.rank} of {self.count}",
                found=first_line,
                hint="its own output says why; start all of them again with --resume",
            ) from error


def nodes_of(recipe: Recipe) -> Nodes:
    """The processes that torchrun's environment names; without it a single process.

    Raises:
        RefusedError: the environment says nonsense, or the recipe asks for what cannot be shared.
    """
    process = check_processes(recipe)
    return Nodes(process.rank, process.count, recipe.watchdog_s)


@dataclass(frozen=True)
class _Received(Checkpoint):
    """A checkpoint that came from the first process."""

    content: dict[str, dict[str, torch.Tensor]]

    def tensors(self, group: str) -> Any:
        return self.content[group]


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensors[name].dtype), list(tensors[name].shape)) for name in tensors}


class Sharing:
    """One process' part in the steps of a run; owns the thread that sums gradients, inside `with`."""

    def __init__(
        self,
        nodes: Nodes,
        store: WeightStore,
        late_layers: Sequence[int],
        table: str = "",
        *,
        owner: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            store: of the gradients.
            late_layers: trained layers whose gradients are complete at the end of a step only.
            table: name of the embedding table.
            owner: rank by layer, where one process alone wants the sum of each; None: all want all.
        """
        self._owner = owner
        self._nodes, self._store = nodes, store
        self._table = table if table in store.trainable_names and store.layer_of(table) == 0 else None
        """The table, if it is trained and not tied to the head: its gradient is zero but for the rows of tokens."""
        self._rows: torch.Tensor | None = None
        """Token ids of the step, of all processes."""
        trained = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        late = sorted(set(late_layers) & set(trained))
        self._layers = [layer for layer in reversed(trained) if layer not in late] + late
        """Layers in the order of their sums, which must be equal on all processes; about that of backward."""
        self._complete: dict[int, Callable[[], float]] = {}
        self._changed = threading.Condition()
        self._orders: queue.Queue[int | None] = queue.Queue()
        self._answers: queue.Queue[dict[int, float] | BaseException] = queue.Queue()
        self._given_up = False
        self.given: set[int] = set()
        """Layers of the step whose gradients the others may have: where the step is computed again, those stay."""
        self._thread = threading.Thread(target=self._main, name="gradient-sums", daemon=True)

    def __enter__(self) -> Sharing:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify()
        self._orders.put(None)
        self._thread.join(1.0 if error is not None else 5.0)

    def share_of(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], Part]:
        """This process' microbatches of a step: every process has about as many, in order."""
        rank, count = self._nodes.rank, self._nodes.count
        first, last = (len(microbatches) * index // count for index in (rank, rank + 1))
        num_units = sum(len(target_rows(microbatch.labels)[1]) for microbatch in microbatches)
        mine = list(microbatches[first:last])
        if self._table is not None:
            self._rows = torch.cat([microbatch.input_ids.flatten() for microbatch in microbatches]).unique()
        if not mine:  # in a short last step: a microbatch without a target adds nothing
            nothing = microbatches[0]
            mine = [replace(nothing, labels=torch.full_like(nothing.labels, IGNORED_LABEL))]
        return mine, Part(first, num_units)

    def begin(self, step: int, on_gradient: OnGradient | None = None) -> OnGradient:
        """The gradients of `step` will be summed as `complete` names their layers; returns that.

        Args:
            on_gradient: never given: nobody may use a gradient before it is summed.
        """
        assert on_gradient is None
        self._complete, self.given = {}, set()
        self._orders.put(step)
        return self.complete

    def complete(self, layer: int, square_sum: Callable[[], float]) -> None:
        """This process' gradient of `layer` is complete. Called by any thread; arguments as of `OnGradient`."""
        with self._changed:
            if layer not in self.given:
                self.given.add(layer)
                self._complete[layer] = square_sum
                self._changed.notify()

    def finish(self, result: StepResult, loss_scale: float) -> StepResult:
        """The step's result over all processes, when all gradients are summed.

        Raises:
            NodeLostError: another process ended.
        """
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        squares = [answer[layer] for layer in sorted(answer)]
        shared = squares if self._owner is not None else []
        loss, tokens, *whole = self._nodes.sums([result.loss, result.num_target_tokens, *shared])
        squares = whole or squares
        norm = math.sqrt(sum(squares)) / loss_scale
        return replace(result, loss=loss, num_target_tokens=int(tokens), gradient_norm=norm)

    def _main(self) -> None:
        set_own_threads(1)  # a sum over several threads would depend on their number
        while (step := self._orders.get()) is not None:
            try:
                answer: dict[int, float] | BaseException = self._sum(step)
            except BaseException as error:  # passed on as a value; `finish` raises it
                answer = error
            self._answers.put(answer)

    def _sum(self, step: int) -> dict[int, float]:
        squares = {}
        for layer in self._layers:
            with self._changed:
                while layer not in self._complete and not self._given_up:
                    self._changed.wait()
                if self._given_up:
                    raise RoundpipeError("the run is over")
                on_host = self._complete.pop(layer)
            with suppress(torch.AcceleratorError):  # its device was lost since, which had sent it
                on_host()
            gradient = self._store.gradients[layer]
            if self._table is not None and layer == 0:
                self._sum_embed(gradient, self._table)
            else:
                self._add_up(layer, gradient)
            wanted = self._owner is None or self._owner[layer] == self._nodes.rank
            squares[layer] = float(square_sum(gradient)) if wanted else 0.0
        return squares

    def _add_up(self, layer: int, tensor: torch.Tensor) -> None:
        self._nodes.add_up(tensor, None if self._owner is None else self._owner[layer])

    def _sum_embed(self, gradient: torch.Tensor, table: str) -> None:
        """Sum the embed layer's gradient, of the table only the rows that the step has tokens for.

        It is complete last, with nothing left to compute beside its sum, and the table may be a good part of a model.
        """
        rows, view = self._rows, self._store.gradient(table)
        if rows is None or 2 * len(rows) > len(view):
            self._add_up(0, gradient)
            return
        compact = view[rows]
        self._add_up(0, compact)
        view[rows] = compact
        start = view.storage_offset() - gradient.storage_offset()
        for rest in (gradient[:start], gradient[start + view.numel() :]):
            if rest.numel():
                self._add_up(0, rest)
