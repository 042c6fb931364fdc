from __future__ import annotations

from dataclasses import replace

from engine.rollout.admission import Admission
from engine.rollout.messages import Group, Sampling


def group(number: int, prompt: tuple[int, ...], size: int = 4) -> Group:
    return Group(number, f"t{number}", prompt, tuple(range(size)), Sampling(4))


def waves(admission: Admission) -> list[list[tuple[int, int]]]:
    out = []
    while len(admission):
        out.append([(g.group, member) for g, member in admission.next_wave()])
    return out


def test_one_member_goes_ahead_and_the_others_follow_when_its_blocks_stand() -> None:
    admission = Admission(block_size=4, step_tokens=100)
    admission.add(group(0, tuple(range(10))))
    assert waves(admission) == [[(0, 0)], [(0, 1), (0, 2), (0, 3)]]


def test_a_shared_header_is_computed_first_by_one_request() -> None:
    header = tuple(range(8))
    admission = Admission(block_size=4, step_tokens=100)
    admission.add(group(0, (*header, 90, 91, 92, 93, 94), size=2))
    admission.add(group(1, (*header, 80, 81, 82, 83, 84), size=2))
    assert waves(admission) == [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]


def test_prompts_shorter_than_a_block_have_nothing_to_wait_for() -> None:
    admission = Admission(block_size=32, step_tokens=100)
    admission.add(group(0, (1, 2, 3)))
    assert waves(admission) == [[(0, 0), (0, 1), (0, 2), (0, 3)]]


def test_followers_wait_as_many_steps_as_the_prompt_takes() -> None:
    admission = Admission(block_size=4, step_tokens=10)
    admission.add(group(0, tuple(range(25)), size=2))
    assert waves(admission) == [[(0, 0)], [], [], [(0, 1)]]


def test_after_forgetting_the_prompt_is_computed_again() -> None:
    admission = Admission(block_size=4, step_tokens=100)
    admission.add(group(0, tuple(range(9)), size=2))
    waves(admission)
    admission.forget()
    admission.add(group(1, tuple(range(9)), size=2))
    assert waves(admission) == [[(1, 0)], [(1, 1)]]


def test_only_the_members_that_are_asked_for_enter_and_a_dropped_group_does_not() -> None:
    admission = Admission(block_size=32, step_tokens=100)
    admission.add(replace(group(0, (1, 2, 3)), members=(1, 3)))
    admission.add(group(1, (1, 2, 3)))
    admission.drop([1])
    assert waves(admission) == [[(0, 1), (0, 3)]]
