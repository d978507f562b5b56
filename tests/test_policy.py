"""Every policy, every combinator, every message, the JSON form and the keys."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from small_facts import facts, machine, storage, value

from graphoffload.errors import PolicyError
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import (
    Answer,
    ByName,
    Chosen,
    FirstOf,
    FollowTags,
    KeepAll,
    Ledger,
    Never,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
    Only,
    Policy,
    ask,
    check_policy,
    fit,
    forbids,
    needs_of,
    policy_from_json,
    policy_key,
    policy_to_json,
    requests_offload,
    requests_recompute,
    unmatched,
)
from graphoffload.planning.values import Value

KEEP, OFFLOAD, RECOMPUTE = Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE
MIB = 2**20
EMPTY = Ledger(total_nbytes=10 * MIB)


def some(nbytes: int | None = 4 * MIB, **changes: Any) -> Value:
    """Return a value of one layer's up-projection."""
    names = {"label": "gate", "module_path": "model.layers.3.mlp", "op": "aten.mm.default"}
    return value("mm_7", storage("mm_7", nbytes, birth=0, back=1), **{**names, **changes})


@dataclass(frozen=True)
class Bfloat16Only:
    """A policy of a user's own, with nothing but decide."""

    depth: int = 0
    inner: Policy | None = None

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return OFFLOAD if value.dtype == "bfloat16" else None


@dataclass(frozen=True)
class Wrong:
    answers: Any = "offload"

    def decide(self, value: Value, ledger: Ledger) -> Any:
        return self.answers


# The policies one by one


def test_keep_all() -> None:
    assert KeepAll().decide(some(), EMPTY) is KEEP
    assert (requests_offload(KeepAll()), requests_recompute(KeepAll()), needs_of(KeepAll())) == (
        False,
        False,
        frozenset(),
    )


def test_offload_all_leaves_small_storages() -> None:
    assert OffloadAll().min_nbytes == MIB
    assert OffloadAll().decide(some(MIB), EMPTY) is OFFLOAD
    assert OffloadAll().decide(some(MIB - 1), EMPTY) is None
    assert ask(OffloadAll(), some(1000), EMPTY).reason == "1 kB is below min_nbytes (1.05 MB)"
    assert OffloadAll(min_nbytes="8MiB").decide(some(), EMPTY) is None  # type: ignore[arg-type]  # strings are taken
    # The storage counts: a small view of big memory moves with it.
    assert OffloadAll().decide(some(nbytes=4 * MIB), EMPTY) is OFFLOAD
    assert requests_offload(OffloadAll())


def test_offload_bytes_takes_what_fits() -> None:
    policy = OffloadBytes(10 * MIB)
    assert policy.decide(some(), EMPTY) is OFFLOAD
    assert policy.decide(some(), Ledger(offloaded_nbytes=6 * MIB)) is OFFLOAD
    assert policy.decide(some(), Ledger(offloaded_nbytes=6 * MIB + 1)) is None
    assert (
        "6.29 MB of OffloadBytes' 10.5 MB are used, and this would pass it"
        in ask(policy, some(), Ledger(offloaded_nbytes=6 * MIB + 1)).reason
    )
    assert policy.decide(some(100), EMPTY) is None
    assert OffloadBytes("10MiB") == policy
    assert requests_offload(policy)
    assert not requests_offload(OffloadBytes(0))
    assert needs_of(policy) == frozenset()


def test_offload_bytes_takes_a_fraction_of_the_total() -> None:
    half = OffloadBytes(0.5)
    assert half.decide(some(), Ledger(offloaded_nbytes=1 * MIB, total_nbytes=10 * MIB)) is OFFLOAD
    assert half.decide(some(), Ledger(offloaded_nbytes=2 * MIB, total_nbytes=10 * MIB)) is None
    assert needs_of(half) == {"total_nbytes"}
    with pytest.raises(PolicyError, match=r"OffloadBytes\(0.5\) is a fraction .* total is not known here"):
        half.decide(some(), Ledger())


def test_one_byte_is_not_everything() -> None:
    assert OffloadBytes(1) != OffloadBytes(1.0)
    assert policy_key(OffloadBytes(1)) != policy_key(OffloadBytes(1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OffloadBytes(0.0), "a float is a fraction"),
        (lambda: OffloadBytes(5.5e9), 'give an int, or a string such as "5.5GB"'),
        (lambda: OffloadBytes(float("nan")), "a float is a fraction"),
        (lambda: OffloadBytes(-0.5), "a float is a fraction"),
        (lambda: OffloadBytes(-1), r"OffloadBytes\(amount\) is -1"),
        (lambda: OffloadBytes(True), r"OffloadBytes\(amount\) is True"),
        (lambda: OffloadBytes("5 apples"), "'apples' is no unit of memory"),
        (lambda: OffloadBytes(1, min_nbytes=-1), r"OffloadBytes\(min_nbytes\) is -1"),
        (lambda: OffloadAll(min_nbytes=-1), r"OffloadAll\(min_nbytes\) is -1"),
        (lambda: OffloadHidden(min_nbytes=-1), r"OffloadHidden\(min_nbytes\) is -1"),
        (lambda: OffloadHidden(slack=-0.1), r"OffloadHidden\(slack\) is -0.1"),
        (lambda: OffloadHidden(slack=float("nan")), r"OffloadHidden\(slack\) is nan"),
        (lambda: OffloadHidden(slack=True), r"OffloadHidden\(slack\) is True"),
        (ByName, "ByName has no pattern"),
        (lambda: ByName(names=3), r"ByName\(names\) is a int"),  # type: ignore[arg-type]
        (lambda: ByName(ops=("",)), r"ByName\(ops\) holds ''"),
        (lambda: ByName(modules=(3,)), r"ByName\(modules\) holds 3"),  # type: ignore[arg-type]
        (lambda: ByName("x", action="offload"), "give Action.KEEP, Action.OFFLOAD or Action.RECOMPUTE"),  # type: ignore[arg-type]
        (FirstOf, "FirstOf has no policies"),
        (lambda: FirstOf(KeepAll), "the policy is the class KeepAll, not an object"),  # type: ignore[arg-type]
        (lambda: FirstOf("KeepAll"), "a str is not a policy"),  # type: ignore[arg-type]
        (lambda: Only(KeepAll()), "Only restricts nothing"),
        (lambda: Only(None, names="x"), "a NoneType is not a policy"),  # type: ignore[arg-type]
        (lambda: Only(KeepAll(), dtypes=(1,)), r"Only\(dtypes\) holds 1"),  # type: ignore[arg-type]
        (lambda: Only(KeepAll(), min_nbytes="-1GB"), r"Only\(min_nbytes\) is '-1GB'"),  # type: ignore[arg-type]
        (lambda: Never(()), "Never forbids nothing"),
        (lambda: Never(None), r"Never\(what\) is a NoneType"),  # type: ignore[arg-type]
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


def test_offload_hidden_is_fitted_to_the_program() -> None:
    # Forward lasts 6 s: A is out by 3 s and B by 5 s; C would be out by 7 s.
    storages = [storage(name, 20, birth=index, back=17 - index) for index, name in enumerate("ABC")]
    program = facts(storages, forward=6, backward=12)
    policy = OffloadHidden(min_nbytes=0, slack=0.0)
    fitted = fit(policy, program, machine())
    assert fitted == Chosen(frozenset("AB"), "the link hides it")
    assert [fitted.decide(one, EMPTY) for one in program.values] == [OFFLOAD, OFFLOAD, None]
    assert ask(fitted, program.values[2], EMPTY).reason == "not so that the link hides it"
    assert needs_of(policy) == {"timeline"}
    assert not requests_offload(policy)
    with pytest.raises(PolicyError, match="needs the timeline of the whole program"):
        policy.decide(some(), EMPTY)


def test_fitting_reaches_the_policies_inside_others() -> None:
    storages = [storage(name, 20, birth=index, back=17 - index) for index, name in enumerate("ABC")]
    program = facts(storages, forward=6, backward=12)
    hidden = OffloadHidden(min_nbytes=0, slack=0.0)
    fitted = fit(FirstOf(Never(Only(hidden, names="A")), Only(hidden, names=("B", "C")), KeepAll()), program, machine())
    assert [fitted.decide(one, EMPTY) for one in program.values] == [KEEP, OFFLOAD, OFFLOAD]
    assert fit(KeepAll(), program, machine()) == KeepAll()
    assert fit(Never("A"), program, machine()) == Never("A")


@pytest.mark.parametrize(
    ("policy", "matches"),
    [
        (ByName("gate"), True),
        (ByName("g*"), True),
        (ByName("mm_7"), True),
        (ByName("mm_?"), True),
        (ByName("mm"), False),
        (ByName(("up", "gate")), True),
        (ByName(modules="model.layers.3.mlp"), True),
        (ByName(modules="model.layers.3"), True),
        (ByName(modules="model.layers.*"), True),
        (ByName(modules="*.mlp"), True),
        (ByName(modules="layers.3"), False),
        (ByName(modules="model.layers.33"), False),
        (ByName(ops="aten.mm.default"), True),
        (ByName(ops="aten.mm"), True),
        (ByName(ops="aten.*"), True),
        (ByName(ops="mm"), False),
        (ByName("gate", modules="model.*", ops="aten.mm"), True),
        (ByName("gate", modules="model.*", ops="aten.add"), False),
    ],
)
def test_by_name(policy: ByName, matches: bool) -> None:
    assert policy.decide(some(), EMPTY) is (OFFLOAD if matches else None)


def test_by_name_gives_any_action_and_says_what_it_needs() -> None:
    assert ByName("gate", action=KEEP).decide(some(), EMPTY) is KEEP
    recompute = ByName("gate", action=RECOMPUTE)
    assert recompute.decide(some(), EMPTY) is RECOMPUTE
    assert ask(recompute, some(), EMPTY).reason == "ByName says recompute for 'gate'"
    assert ask(recompute, some(label="up"), EMPTY) == Answer(None, "ByName's patterns do not match it")
    assert (requests_offload(recompute), requests_recompute(recompute)) == (False, True)
    assert needs_of(ByName("gate", modules="m", ops="aten.mm")) == {"label", "module_path", "op"}
    assert needs_of(ByName(modules="m")) == {"module_path"}
    assert ByName(modules="m").decide(some(module_path=""), EMPTY) is None


@pytest.mark.parametrize(
    ("tag", "action"),
    [
        ("MUST_CPU_OFFLOAD", OFFLOAD),
        ("PREFER_CPU_OFFLOAD", OFFLOAD),
        ("MUST_SAVE", None),
        ("PREFER_RECOMPUTE", None),
        (None, None),
    ],
)
def test_follow_tags(tag: str | None, action: Action | None) -> None:
    assert FollowTags().decide(some(tag=tag), EMPTY) is action
    assert needs_of(FollowTags()) == {"tag"}
    assert ask(FollowTags(), some(tag=tag), EMPTY).reason in (f"tagged {tag}", "not tagged for offloading")


# Combinators


def test_first_of_follows_the_first_opinion() -> None:
    policy = FirstOf(ByName("up", action=KEEP), ByName("gate"), KeepAll())
    assert policy.decide(some(), EMPTY) is OFFLOAD
    assert policy.decide(some(label="up"), EMPTY) is KEEP
    assert policy.decide(some(label="down"), EMPTY) is KEEP
    undecided = FirstOf(OffloadAll(min_nbytes=5000), FollowTags())
    assert ask(undecided, some(1000), EMPTY) == Answer(
        None, "1 kB is below min_nbytes (5 kB); not tagged for offloading"
    )
    assert needs_of(FirstOf(FollowTags(), ByName(ops="a"), OffloadBytes(0.5))) == {"tag", "op", "total_nbytes"}
    assert requests_offload(FirstOf(KeepAll(), OffloadAll()))
    assert not requests_offload(FirstOf(KeepAll(), FollowTags()))
    assert requests_recompute(FirstOf(KeepAll(), ByName("x", action=RECOMPUTE)))
    assert not requests_recompute(FirstOf(KeepAll(), OffloadAll()))


def test_only_asks_about_what_matches() -> None:
    assert Only(OffloadAll(), dtypes="float32").decide(some(), EMPTY) is OFFLOAD
    assert Only(OffloadAll(), dtypes="bfloat16").decide(some(), EMPTY) is None
    assert Only(OffloadAll(), dtypes="torch.float32").decide(some(), EMPTY) is None
    assert Only(KeepAll(), min_nbytes=4 * MIB + 1).decide(some(), EMPTY) is None
    assert Only(KeepAll(), min_nbytes=4 * MIB).decide(some(), EMPTY) is KEEP
    assert Only(KeepAll(), min_nbytes=1).decide(some(None), EMPTY) is KEEP
    policy = Only(OffloadBytes(0.5), modules="model.layers.3", ops="aten.mm")
    assert policy.decide(some(), EMPTY) is OFFLOAD
    assert policy.decide(some(op="aten.add.Tensor"), EMPTY) is None
    assert ask(policy, some(op="aten.add.Tensor"), EMPTY).reason == "outside what Only lets OffloadBytes decide"
    assert needs_of(policy) == {"total_nbytes", "module_path", "op"}
    assert needs_of(Only(KeepAll(), dtypes="x", names="y")) == {"label"}
    assert requests_offload(policy)
    assert not requests_recompute(policy)


@pytest.mark.parametrize("what", ["gate", "model.layers.3", "aten.mm", ("up", "mm_7"), ByName("gate"), OffloadAll()])
def test_never_forbids_wherever_it_stands(what: Any) -> None:
    never = Never(what)
    assert never.decide(some(), EMPTY) is KEEP
    assert forbids(never, some(), EMPTY)
    for policy in (FirstOf(never, OffloadAll()), FirstOf(OffloadAll(), never), FirstOf(OffloadAll(), FirstOf(never))):
        assert policy.decide(some(), EMPTY) is KEEP
        assert forbids(policy, some(), EMPTY)
        assert "Never" in ask(policy, some(), EMPTY).reason
    assert not requests_offload(never)


def test_never_leaves_the_rest_alone() -> None:
    assert Never("up").decide(some(), EMPTY) is None
    assert Never(KeepAll()).decide(some(), EMPTY) is None
    assert FirstOf(Never("up"), OffloadAll()).decide(some(), EMPTY) is OFFLOAD
    assert not forbids(FirstOf(Never("up"), OffloadAll()), some(), EMPTY)
    assert not forbids(OffloadAll(), some(), EMPTY)
    restricted = Only(Never("gate"), dtypes="bfloat16")
    assert not forbids(restricted, some(), EMPTY)
    assert needs_of(Never("x")) == {"label", "module_path", "op"}
    assert needs_of(Never(FollowTags())) == {"tag"}


def test_patterns_that_match_nothing_are_named() -> None:
    values = (some(),)
    policy = FirstOf(
        ByName(("gate", "gaet")),
        Only(OffloadAll(), modules="modle.*"),
        Never(("lm_heed", "aten.mm")),
        Never(ByName(ops="x")),
    )
    assert unmatched(policy, values) == (
        "the pattern 'gaet' of ByName matches no saved value",
        "the pattern 'modle.*' of Only matches no saved value",
        "the pattern 'lm_heed' of Never matches no saved value",
        "the pattern 'x' of ByName matches no saved value",
    )
    assert unmatched(OffloadAll(), values) == ()
    assert unmatched(Bfloat16Only(), values) == ()


# What is a policy


def test_a_policy_of_the_users_own_needs_nothing_but_decide() -> None:
    own = Bfloat16Only()
    assert check_policy(own) is own
    assert ask(own, some(), EMPTY) == Answer(None, "Bfloat16Only has no opinion")
    assert (requests_offload(own), requests_recompute(own), needs_of(own)) == (True, True, frozenset())
    assert FirstOf(own, KeepAll()).decide(some(), EMPTY) is KEEP


@dataclass
class Mutable:
    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return None


@dataclass(frozen=True)
class Needy:
    needs: ClassVar[frozenset[str]] = frozenset({"colour", "tag"})

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return None


@dataclass(frozen=True)
class Mumbling:
    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return None

    def answer(self, value: Value, ledger: Ledger) -> str:
        return "keep"


class Plain:
    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return None


@dataclass(frozen=True)
class Named:
    policy: str = ""

    def decide(self, value: Value, ledger: Ledger) -> Action | None:
        return None


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (OffloadAll, r"the policy is the class OffloadAll, not an object: write OffloadAll\(...\)"),
        (None, r"a NoneType is not a policy: it has no decide\(value, ledger\)"),
        ("OffloadAll", "a str is not a policy"),
        (Mutable(), "Mutable cannot be hashed .* make it a frozen dataclass"),
        (Wrong([1]), "Wrong cannot be hashed"),
        (Needy(), "Needy.needs names colour; facts are label, module_path, op, tag, timeline, total_nbytes"),
    ],
)
def test_what_is_no_policy_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        check_policy(thing)


@pytest.mark.parametrize("answer", ["offload", True, 1])
def test_an_answer_that_is_no_action_is_refused(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"Wrong answered .* for 'mm_7'; a policy answers Action.KEEP"):
        ask(Wrong(answer), some(), EMPTY)


def test_an_explanation_that_is_no_answer_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"Mumbling.answer returned 'keep' for 'mm_7'; it must return an Answer"):
        ask(Mumbling(), some(), EMPTY)


# The ledger


def test_the_ledger_moves_bytes_between_actions() -> None:
    ledger = Ledger(total_nbytes=9).moved(4, to=OFFLOAD).moved(3, to=RECOMPUTE).moved(2, to=KEEP)
    assert ledger == Ledger(kept_nbytes=2, offloaded_nbytes=4, recomputed_nbytes=3, total_nbytes=9)
    assert ledger.moved(3, to=OFFLOAD, before=RECOMPUTE) == Ledger(2, 7, 0, 9)


# JSON and keys


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (OffloadAll(), '{"policy": "OffloadAll", "min_nbytes": 1048576}'),
        (KeepAll(), '{"policy": "KeepAll"}'),
        (
            FirstOf(Never("lm_head"), OffloadBytes(0.5)),
            '{"policy": "FirstOf", "policies": [{"policy": "Never", "what": ["lm_head"]}, '
            '{"policy": "OffloadBytes", "amount": 0.5, "min_nbytes": 1048576}]}',
        ),
        (
            ByName("x", action=KEEP),
            '{"policy": "ByName", "names": ["x"], "modules": [], "ops": [], "action": "keep"}',
        ),
        (Chosen(frozenset("ba"), "r"), '{"policy": "Chosen", "storages": ["a", "b"], "reason": "r"}'),
        (
            Bfloat16Only(3, KeepAll()),
            f'{{"policy": "{__name__}:Bfloat16Only", "depth": 3, "inner": {{"policy": "KeepAll"}}}}',
        ),
        (
            Never(Bfloat16Only()),
            f'{{"policy": "Never", "what": {{"policy": "{__name__}:Bfloat16Only", "depth": 0, "inner": null}}}}',
        ),
    ],
)
def test_policies_are_written_and_read(policy: Policy, text: str) -> None:
    assert policy_to_json(policy) == text
    assert policy_from_json(text) == policy


def test_a_person_may_leave_out_defaults_and_write_sizes() -> None:
    assert policy_from_json('{"policy": "OffloadAll"}') == OffloadAll()
    assert policy_from_json('{"policy": "OffloadBytes", "amount": "5.5GB"}') == OffloadBytes("5.5GB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON of a policy"),
        ("[]", r"policy must be an object such as .* found \[\]"),
        ('{"name": "KeepAll"}', "policy must be an object such as"),
        (
            '{"policy": "OfloadAll"}',
            "there is no policy 'OfloadAll'; there are ByName, Chosen, FirstOf, FollowTags, KeepAll, Never",
        ),
        ('{"policy": "OffloadAll", "min_bytes": 1}', "OffloadAll has no field 'min_bytes'; it has min_nbytes"),
        ('{"policy": "KeepAll", "x": 1}', "KeepAll has no field 'x'; it has none"),
        ('{"policy": "OffloadAll", "min_nbytes": "x"}', "OffloadAll.min_nbytes: expected int, found 'x'"),
        ('{"policy": "OffloadAll", "min_nbytes": -1}', r"OffloadAll\(min_nbytes\) is -1"),
        ('{"policy": "OffloadBytes"}', "OffloadBytes needs the field 'amount'"),
        ('{"policy": "FirstOf"}', "FirstOf needs the field 'policies'"),
        ('{"policy": "FirstOf", "policies": []}', "FirstOf has no policies"),
        ('{"policy": "FirstOf", "policies": [1]}', r"FirstOf.policies\[0\] must be an object"),
        ('{"policy": "FirstOf", "policies": [{"policy": "X"}]}', "there is no policy 'X'"),
        ('{"policy": "Never", "what": {"policy": "X"}}', "there is no policy 'X'"),
        (
            '{"policy": "ByName", "names": ["x"], "action": "burn"}',
            "'burn'; expected one of 'keep', 'offload', 'recompute'",
        ),
        ('{"policy": "not_imported_here:P"}', "in a module that is not imported; import not_imported_here"),
        (f'{{"policy": "{__name__}:Nothing"}}', "names no policy"),
        (f'{{"policy": "{__name__}:Plain"}}', "names no policy"),
        ('{"policy": "os:path"}', "names no policy"),
    ],
)
def test_what_is_no_policy_in_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy_from_json(text)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Plain(), "the policy Plain is not a dataclass"),
        (Wrong(object()), "Wrong.answers is a object, which cannot be written as JSON"),
        (Wrong((1, float("nan"))), r"Wrong.answers\[1\] is nan"),
        (Named("x"), "Named has a field 'policy', which in JSON is its own name"),
    ],
)
def test_what_cannot_be_written_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy_to_json(policy)


def test_keys_depend_on_class_fields_and_nothing_else() -> None:
    policies: list[Policy] = [
        KeepAll(),
        FollowTags(),
        OffloadAll(),
        OffloadAll(min_nbytes=0),
        OffloadBytes(5),
        Bfloat16Only(),
        Bfloat16Only(1),
        FirstOf(Bfloat16Only()),
        Only(Bfloat16Only(), names="x"),
    ]
    keys = [policy_key(policy) for policy in policies]
    assert len(set(keys)) == len(keys)
    assert keys == [policy_key(policy) for policy in policies]
    assert policy_key(OffloadAll(min_nbytes="1MiB")) == policy_key(OffloadAll())  # type: ignore[arg-type]


def test_keys_are_the_same_in_every_process() -> None:
    policy = FirstOf(Never("x"), Chosen(frozenset("abcdef"), "r"))
    program = (
        "import sys; from graphoffload.planning.policy import policy_from_json, policy_key; "
        "print(policy_key(policy_from_json(sys.argv[1])))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, policy_to_json(policy)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.stdout.strip() == policy_key(policy)


def own_policy(source: str) -> Policy:
    """Make a policy class from source that inspect cannot find, as at a prompt."""
    scope: dict[str, Any] = {"dataclass": dataclass, "Action": Action, "__name__": "prompt"}
    exec(source, scope)  # this is how a prompt makes classes
    made: Policy = scope["Own"]()
    return made


def test_editing_a_policy_of_the_users_own_changes_its_key() -> None:
    source = "@dataclass(frozen=True)\nclass Own:\n    def decide(self, value, ledger):\n        return {}\n"
    keep, offload = own_policy(source.format("Action.KEEP")), own_policy(source.format("value"))
    assert policy_to_json(keep) == policy_to_json(offload)
    assert policy_key(keep) != policy_key(offload)
    assert policy_key(keep) == policy_key(own_policy(source.format("Action.KEEP")))


def test_json_is_one_object_with_the_name_first() -> None:
    data = json.loads(policy_to_json(OffloadHidden()))
    assert next(iter(data)) == "policy"
    assert data == {"policy": "OffloadHidden", "min_nbytes": MIB, "slack": 0.01}
