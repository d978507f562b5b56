"""The eager path: a policy on autograd's saved-tensor hooks, for models that are not compiled.

Theory of operation. Inside the context autograd shows every tensor that it saves to `pack`. What the policy moves becomes a
share of a parcel (see parcels.py), what stays becomes a watched reference; autograd holds these, and nothing else does.
When backward needs the tensor, in whatever order, as often as it likes, or never, `unpack` brings it back. Foresight starts
reloads before they are asked for, the room bounds what runs ahead (see there), and the first forward on a device waits for
every copy, so that the room learns the level and the foresight the order.

The hooks run beside the program, never inside a trace of it, and on whichever thread runs forward or backward.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from graphoffload.errors import GraphOffloadWarning, PolicyError, UsageError
from graphoffload.planning.machine import Machine, as_machine
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import (
    MUST,
    NEVER,
    Ledger,
    Policy,
    check_policy,
    least_nbytes,
    needs_of,
    requests_offload,
)
from graphoffload.planning.sizes import format_nbytes
from graphoffload.runtime.eager_facts import (
    is_of_compiled_code,
    refuse_unknown_facts,
    value_of,
    why_it_cannot,
    why_not_asked_for,
)
from graphoffload.runtime.kinds import Body, body_of, is_plain
from graphoffload.runtime.learnt import learnt_of
from graphoffload.runtime.module_paths import ModulePaths
from graphoffload.runtime.ops import on_device
from graphoffload.runtime.parcels import Episode, Kept, Parcel, Share, unseen
from graphoffload.runtime.room import Room
from graphoffload.runtime.slots import version_of
from graphoffload.runtime.stats import SavedTensorsStats
from graphoffload.runtime.tally import Tally


class _Thread(threading.local):
    """Hold one thread's place in the program: its episode, and the policy's running totals for it."""

    def __init__(self) -> None:
        self.episode: Episode | None = None
        self.ledger = Ledger()
        self.answers: dict[int, tuple[int, str, weakref.ref[Kept]]] = {}
        self.entered: list[tuple[Any, int, int]] = []


class saved_tensors:  # noqa: N801  # named as torch names such contexts
    """Keep or offload, inside the block, the tensors that autograd saves for backward.

    ::

        with graphoffload.saved_tensors(policies.OffloadAll(), model=model):
            loss = model(batch)
        loss.backward()

    - policy: decides for every saved tensor. Facts that eager code cannot know, it may not need: see `docs/eager.md`.
    - model: its parameters and buffers are known by their memory and never move, and what is learnt in one step (order of
      return, how much may run ahead) and the pinned memory live as long as it does. Without it they live as long as the
      code that makes the context. Needed for policies that choose by module.
    - machine: a `Machine` or the name of one, for its budgets: `host_budget_nbytes` is never passed (what does not fit stays
      on the device), `in_flight_nbytes` bounds what is on its way out; default: the device's own, without budgets.

    Gradients are those of plain PyTorch, to the bit. A saved tensor that stays and is changed in place makes backward raise,
    as without the context. One that moves keeps its old value, or backward raises, if the copy may not have been whole.

    Backward may run inside or outside the block, later, twice, in parts, or never. A context may be used again, nested (the
    innermost fires), and in several threads. Raises `PolicyError` for a policy that eager code cannot follow and, while
    packing, for a MUST_CPU_OFFLOAD tag that cannot be honoured; `MachineError` and `UsageError` for the other arguments.
    """

    keeps_slots = True  # hooks of ours never read host memory before its copy has ended, see Runtime.release

    def __init__(self, policy: Policy, *, model: nn.Module | None = None, machine: Machine | str | None = None) -> None:
        self._policy: Policy = check_policy(policy)
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"saved_tensors(model=) is a {type(model).__name__}; give a torch.nn.Module")
        machine = as_machine(machine, what="saved_tensors(machine=)")
        refuse_unknown_facts(policy, model)
        self._model = model
        self._paths = ModulePaths() if "module_path" in needs_of(policy) else None
        self._least = least_nbytes(policy)
        self._small = (
            "the policy moves nothing that is not tagged"
            if self._least == NEVER
            else f"it is smaller than {format_nbytes(self._least)}, the least that the policy moves"
        )
        self._machine = machine
        self._learnt = learnt_of(model, sys._getframe(1).f_code, policy, machine)
        self._tally = Tally()
        self._thread = _Thread()

    def __enter__(self) -> saved_tensors:
        here = self._thread
        self._learnt.owned.refresh()
        for room in self._learnt.rooms:
            room.runtime.tidy()  # a forward whose loss was dropped may have left sources in flight
        with contextlib.ExitStack() as stack:
            if self._paths is not None and self._model is not None:
                stack.enter_context(self._paths.following(self._model))
            try:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            except RuntimeError as error:
                _name_the_way_out(error)
                raise
            entered = stack.pop_all()
        here.entered.append((entered, self._tally.packed, self._tally.moved))
        here.episode = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        stack, packed, moved = self._thread.entered.pop()
        self._thread.episode = None
        stack.close()
        if error is not None:
            _name_the_way_out(error)
        elif self._tally.packed > packed and self._tally.moved == moved:
            self._warn_of_nothing()

    def stats(self) -> SavedTensorsStats:
        """Return what was counted since this object was made. Host and pinned bytes are the device's, whoever uses them."""
        with self._learnt.lock:
            return self._tally.stats(self._learnt.rooms)

    # The two hooks

    def pack(self, tensor: torch.Tensor, *, tag: str | None = None) -> Kept | Share:
        """Take a tensor that autograd saves; return what it holds instead."""
        with self._learnt.lock:
            episode = self._episode()
            body: Body | str = Body(tensor, None) if is_plain(tensor) else body_of(tensor)
            if not isinstance(body, str) and not body.main.numel():
                body = "it has no bytes"
            if isinstance(body, str):
                if tag == MUST and tensor.numel():
                    raise _cannot(body)
                episode.enter((type(tensor), 0))
                self._tally.packed += 1
                self._tally.keep(body, 0)
                return Kept(tensor, episode=episode, place=None)
            main = body.main
            place = episode.enter((main.dtype, main.ndim))
            storage = main.untyped_storage()
            nbytes = storage.nbytes()
            if self._learnt.owned.owns(tensor, storage):
                why = "it is the memory of a parameter or buffer"
            elif tag is None and 0 < nbytes < self._least:
                why = self._small
            else:
                why = why_it_cannot(main, nbytes)
            if not why:
                return self._place(tensor, body, storage, episode, place, tag)
            if tag == MUST:
                raise _cannot(why)
            if nbytes >= self._least and on_device(main.device):
                room = self._learnt.room(main.device)
                room.runtime.device.see("kept", (main,))
                self._look(room, episode, place)
            return self._keep(tensor, why, storage, place)

    def unpack(self, packed: Kept | Share) -> torch.Tensor:
        """Return the tensor that `pack` took."""
        if isinstance(packed, Kept):
            episode = packed.episode
            if episode is not None and (packed.place is not None or not episode.closed):
                with self._learnt.lock:
                    self._learnt.close(episode)
                    if packed.place is not None:
                        room = self._learnt.known_room(packed.tensor.device)
                        if room is not None:
                            episode.look(packed.place, room.moment())
                            self._learnt.run_ahead(episode, self._tally)
                        packed.place = None  # once: a graph may be run backward a thousand times
            return packed.get()
        with self._learnt.lock:
            return self._bring(packed)

    # Packing

    def _episode(self) -> Episode:
        here = self._thread
        if here.episode is None or here.episode.closed:
            here.episode = self._learnt.begin()
            here.ledger = Ledger()
            here.answers = {}
        return here.episode

    def _keep(self, tensor: torch.Tensor, why: str, storage: torch.UntypedStorage, place: int) -> Kept:
        address, nbytes = storage._cdata, storage.nbytes()
        answers, version = self._thread.answers, tensor._version
        kept = Kept(tensor, episode=self._thread.episode, place=place if nbytes >= self._least else None)
        self._tally.packed += 1
        if self._answer_for(address, version) is None:
            # The first value on this storage: it is counted once. As long as that value lives, so does the storage, and its
            # address means no other.
            answers[address] = (version, why, weakref.ref(kept))
            self._tally.keep(why, nbytes)
        return kept

    def _answer_for(self, address: int, version: int) -> str | None:
        """Return why an earlier value of this episode on the same storage was kept, if one was."""
        known = self._thread.answers.get(address)
        return known[1] if known is not None and known[0] == version and known[2]() is not None else None

    def _place(
        self,
        tensor: torch.Tensor,
        body: Body,
        storage: torch.UntypedStorage,
        episode: Episode,
        place: int,
        tag: str | None,
    ) -> Kept | Share:
        """Put a tensor that could move where the policy wants it."""
        learnt, main = self._learnt, body.main
        watched = (tensor,) if tensor is main else (tensor, main)
        version = version_of(*watched)
        parcel = learnt.parcel_with(main, storage, version)
        if parcel is not None:
            self._tally.packed += 1
            if parcel.episode is episode:
                place = parcel.place
        else:
            room = learnt.room(main.device)
            room.runtime.device.see("saved", (main,))
            why = self._why_it_stays(main, storage, room, version=version, place=place, tag=tag)
            if why:
                self._look(room, episode, place)
                return self._keep(tensor, why, storage, place)
            with unseen():
                wait = room.is_new or episode.is_mutated(place) or not room.admits(storage.nbytes())
                parcel = Parcel(main, storage, room, watched=watched, episode=episode, place=place, wait=wait)
                self._look(room, episode, place)
            learnt.enlist(parcel, storage)
            learnt.has_moved = True
            self._tally.move(parcel.nbytes, is_compiled=is_of_compiled_code())
        episode.parcels[place] = weakref.ref(parcel)
        return Share(parcel, main, place=place, episode=episode, rebuild=body.rebuild)

    def _look(self, room: Room, episode: Episode, place: int) -> None:
        """Note the moment of a pack, and let sources go that there will be no room for."""
        if room.runtime.device.capturing():
            return  # no wait of ours may become a part of somebody's CUDA graph
        episode.packing[place] = room.moment()
        room.clear_sources(episode.after_pack(place))
        room.go_on()

    def _why_it_stays(
        self,
        main: torch.Tensor,
        storage: torch.UntypedStorage,
        room: Room,
        *,
        version: int,
        place: int,
        tag: str | None,
    ) -> str:
        """Ask the policy about a storage, once; return why it is not moved, or nothing if it is."""
        here, nbytes = self._thread, storage.nbytes()
        known = self._answer_for(storage._cdata, version)
        if known is not None and tag == MUST:
            raise _cannot(f"its memory was saved before and stays ({known})")
        if known is not None:
            return known  # an earlier value keeps this memory, so moving it now would free nothing
        value = value_of(main, nbytes, place=place, path=self._paths.current() if self._paths else "", tag=tag)
        why = why_not_asked_for(self._policy, value, here.ledger, note=self._tally.note)
        budget = None if self._machine is None else self._machine.host_budget_nbytes
        if not why and budget is not None and room.runtime.pool.counts.in_use_nbytes + nbytes > budget:
            why = f"the host budget of {format_nbytes(budget)} is used"
            if tag == MUST:
                raise _cannot(why)
        here.ledger = here.ledger.moved(nbytes, to=Action.KEEP if why else Action.OFFLOAD)
        if not why and tag != MUST and here.episode is not None and here.episode.is_late(place):
            why = "it comes back at once"
        return why

    def _warn_of_nothing(self) -> None:
        learnt = self._learnt
        if learnt.has_moved or learnt.has_warned or not requests_offload(self._policy):
            return
        learnt.has_warned = True
        reasons = sorted(self._tally.kept.items(), key=lambda item: -item[1])[:3]
        listed = "; ".join(f"{format_nbytes(nbytes)}: {why}" for why, nbytes in reasons)
        warnings.warn(
            f"graphoffload: {type(self._policy).__name__} asked for offloading, and nothing was moved. What autograd saved "
            f"stays on the device ({listed})",
            GraphOffloadWarning,
            stacklevel=3,
        )

    # Unpacking

    def _bring(self, share: Share) -> torch.Tensor:
        parcel, episode = share.parcel, share.episode
        room = parcel.room
        self._learnt.close(episode)
        if parcel.was_changed() and episode.program is not None:
            episode.program.mutated.add(share.place)
        if parcel.is_torn():
            raise share.changed_in_place()
        with unseen():
            is_first = share.place not in episode.came
            if is_first:
                episode.note(share.place)
                self._learnt.mark(episode, share.place, parcel)
            at_hand = parcel.take()
            if not share.came:
                share.came = True
                parcel.awaited -= 1
                self._tally.hits += at_hand
                self._tally.misses += not at_hand
            if parcel.ahead:
                parcel.ahead = False
                room.leave(parcel.nbytes)
            if not at_hand:
                self._tally.reload(parcel.nbytes)
                room.insist(parcel.start)
            if is_first:
                episode.look(share.place, room.moment())
            # Before the wait for this one: the next copy then starts as soon as this one has ended.
            self._learnt.run_ahead(episode, self._tally)
            memory = parcel.memory()
            tensor = share.on(memory)
        if not parcel.awaited:
            parcel.let_go()
        return tensor


def _name_the_way_out(error: BaseException) -> None:
    if "saved tensor hooks" in str(error):
        error.add_note(
            "graphoffload: torch.func and saved-tensor hooks exclude each other; wrap the torch.func part of the program in "
            "`with graphoffload.keep():`, outside of it"
        )


def _cannot(why: str) -> PolicyError:
    return PolicyError(
        f"a value tagged {MUST} cannot be offloaded: {why}. Take the tag away, or tag it PREFER_CPU_OFFLOAD"
    )
