"""Synchronized statistics: ranks together do what one process with all samples does."""

import random
import time

import pytest
import torch
from ranks import HERE, start

SHARES = {
    2: [[4, 4], [1, 6], [0, 5], [7, 0], [1, 1]],
    3: [[2, 3, 4], [0, 5, 1], [6, 0, 0], [1, 0, 1]],
}


def against_the_oracle(ranks, **case):
    defaults = {
        "seed": random.randrange(2**31), "shares": SHARES[ranks.world], "dtype": "float32", "positions": [3, 2],
        "channel_dim": 1, "per_position": True, "masked": False, "momentum": 0.3,
    }  # fmt: skip
    ranks.check("against_the_oracle", **{**defaults, **case})


FORMS = {
    "per position": {"per_position": True},
    "pooled": {"per_position": False},
    "grouped": {"per_position": False, "groups": 3},
    "grouped, per position": {"per_position": True, "groups": 2},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
THREE_FEATURES = {**FORMS, "grouped, per position": {"per_position": True, "groups": 1}}
every_form_of_three_features = pytest.mark.parametrize("form", THREE_FEATURES.values(), ids=THREE_FEATURES)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@every_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_gradients_and_population_are_those_of_one_process(two_or_three, dtype, form, masked):
    against_the_oracle(two_or_three, dtype=dtype, masked=masked, **form)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@every_form_of_three_features
def test_a_residual_and_an_activation_are_the_rank_s_own(two_or_three, form, masked):
    two_or_three.check("activated", seed=random.randrange(2**31), masked=masked, options=form)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize(("positions", "channel_dim"), [([], 1), ([3], -1), ([2, 3], -1)])
def test_every_layout_type_and_momentum(two, dtype, momentum, positions, channel_dim):
    for form in FORMS.values():
        against_the_oracle(
            two, dtype=dtype, momentum=momentum, positions=positions, channel_dim=channel_dim,
            affine=momentum is None, **form,
        )  # fmt: skip


@every_form
def test_one_rank_alone_may_be_masked(two_or_three, form):
    against_the_oracle(two_or_three, masked=True, only=1, **form)


@pytest.mark.parametrize("groups", [None, 2], ids=["published", "grouped"])
@pytest.mark.parametrize(("masked", "backend"), [(False, "inductor"), (True, "aot_eager")], ids=["whole", "masked"])
def test_compiled_in_one_graph(two_on_cpu, masked, backend, groups):
    """On a CPU alone: collectives of compiled graphs crash on gloo with GPU tensors in torch 2.11, even without us."""
    against_the_oracle(
        two_on_cpu, shares=[[3, 4], [3, 4]], masked=masked, compiled=backend, per_position=masked,
        groups=groups,
    )  # fmt: skip


@every_form_of_three_features
def test_a_mini_batch_without_any_sample_teaches_nothing(two_or_three, form):
    two_or_three.check("empty_everywhere", options=form)


@pytest.mark.parametrize("value", ["nan", "inf"])
@every_form_of_three_features
def test_not_finite_on_one_rank_enters_nowhere(two, form, value):
    two.check("not_finite_on_one_rank", value=float(value), options=form)


@pytest.mark.parametrize("groups", [None, 2], ids=["published", "grouped"])
def test_ranks_may_pad_sequences_to_different_lengths(two_or_three, groups):
    for dtype in ("float64", "float32"):
        two_or_three.check("sequences_of_different_lengths", seed=random.randrange(2**31), dtype=dtype, groups=groups)


def test_different_positions_are_refused_on_all_ranks_before_they_are_learned(two):
    assert all(
        "[(7,), (6,)]" in text and "position_shape=" in text for text in two.check("sequences_of_unknown_lengths")
    )


def test_positions_known_otherwise_are_refused_before_a_message_is_sent(two_on_cpu):
    """gloo ends the process where messages do not fit together."""
    answers = two_on_cpu.check("positions_known_otherwise")
    for texts in answers:
        assert [text.split("positions: ")[1].split(". Ways")[0] for text in texts] == [
            "[(4,), (5,)]", "[(4, 4), (2, 8)]", "[(6,), (3,)]",
        ]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("options", [{}, {"groups": 3}], ids=["published", "grouped"])
def test_ranks_may_have_inputs_of_different_types(two_or_three, options, masked):
    two_or_three.check("ranks_of_different_types", masked=masked, options=options)


@pytest.mark.parametrize("config", ["TTFF", "FFFF"])
@pytest.mark.parametrize("options", [{}, {"groups": 3}], ids=["published", "grouped"])
def test_eval_does_not_communicate(two, config, options):
    two.check("eval_is_local", config=config, options=options)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@every_form_of_three_features
def test_forward_and_backward_use_one_collective_each(two, form, masked):
    two.check("collectives_are_one_each_way", masked=masked, **form)


def test_an_input_may_want_no_gradient(two):
    two.check("without_gradient_of_the_input")


def test_channels_last_stay_last(two):
    two.check("channels_last")


def test_a_group_of_its_own_is_shared_by_copies_and_not_pickled(three):
    three.check("a_group_of_some_ranks", seed=random.randrange(2**31))


@pytest.mark.parametrize("grouped", [False, True], ids=["published", "grouped"])
@pytest.mark.parametrize("how", ["ddp", "no_sync", "checkpoint"])
def test_a_net_trains_as_in_one_process(two, how, grouped):
    two.check("net_against_one_process", seed=random.randrange(2**31), how=how, grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True], ids=["published", "grouped"])
@pytest.mark.parametrize("how", ["compiled", "ddp compiled"])
def test_a_compiled_net_trains_as_in_one_process(two_on_cpu, how, grouped):
    two_on_cpu.check("net_against_one_process", seed=random.randrange(2**31), how=how, grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True], ids=["published", "grouped"])
@pytest.mark.parametrize("how", ["ddp", "no_sync", "checkpoint"])
def test_a_net_trains_with_ranks_that_have_no_data(three, how, grouped):
    three.check("net_against_one_process", seed=random.randrange(2**31), how=how, empty=True, grouped=grouped)


def test_a_sharded_net_trains_as_in_one_process(two_on_cpu, three_on_cpu):
    """On a CPU alone: gloo does not scatter sums of GPU tensors, and NCCL takes a GPU for each rank."""
    for grouped in (False, True):
        case = {"seed": random.randrange(2**31), "how": "fsdp", "grouped": grouped}
        two_on_cpu.check("net_against_one_process", **case)
        three_on_cpu.check("net_against_one_process", **case, empty=True)


def test_converting_sync_batch_norm_keeps_its_group(two):
    two.check("sync_batch_norm_hands_over_its_group")


@pytest.mark.parametrize(("what", "world"), [("train", 3), ("hang", 2), ("calibrate", 2)])
def test_a_lost_rank_fails_the_others_with_a_clear_error(tmp_path, what, world):
    """Killed, the others hear of it at once; stopped, when the group's timeout of 8 s is over."""
    processes = start([str(HERE / "killed.py"), what], world, str(tmp_path))
    try:
        began = time.monotonic()
        outputs = [process.communicate(timeout=100)[0] for process in processes[:-1]]
        assert time.monotonic() - began < 90
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    for rank, output in enumerate(outputs):
        assert f"caught rank {rank} of {world}" in output, output
        assert "has died" in output
        assert output.rstrip().endswith("done")


if torch.cuda.is_available():

    @pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
    @every_form
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
    def test_nccl_exchanges_without_waiting_on_the_host(one_on_gpu, dtype, form, masked):
        """A group of one, made to exchange: NCCL refuses two ranks on one GPU."""
        one_on_gpu.check("through_nccl", dtype=dtype, masked=masked, **form)

    def test_a_step_with_nccl_is_captured_in_a_graph(one_on_gpu):
        one_on_gpu.check("captured_with_nccl")

    def test_averages_calibration_and_search_take_nccl(one_on_gpu):
        one_on_gpu.check("merged_through_nccl")


def test_the_output_may_be_changed_in_place(two):
    two.check("changed_in_place")


# ---- by kernels: where there is no GPU, through Triton's interpreter


@pytest.mark.parametrize("per_position", [True, False], ids=["per position", "pooled"])
@pytest.mark.parametrize(
    ("positions", "channel_dim", "dtype", "momentum"),
    [([3, 2], 1, "float32", 0.3), ([3], -1, "bfloat16", None), ([], 1, "float16", 0.1)],
)
def test_kernels_do_what_one_process_does(two_by_kernels, positions, channel_dim, dtype, momentum, per_position):
    against_the_oracle(
        two_by_kernels, positions=positions, channel_dim=channel_dim, per_position=per_position, dtype=dtype,
        momentum=momentum, affine=momentum is not None,
    )  # fmt: skip


@pytest.mark.parametrize("per_position", [True, False], ids=["per position", "pooled"])
@pytest.mark.parametrize("channel_dim", [1, -1])
def test_kernels_share_the_work_of_a_rank(three_by_kernels, channel_dim, per_position):
    against_the_oracle(
        three_by_kernels, shares=[[9, 40, 0]], positions=[2], channel_dim=channel_dim, per_position=per_position,
        shared=True,
    )  # fmt: skip


@pytest.mark.parametrize("per_position", [True, False], ids=["per position", "pooled"])
def test_kernels_meet_ranks_that_go_other_ways(three_by_kernels, per_position):
    """A rank without samples, one with a mask, one of another type."""
    against_the_oracle(three_by_kernels, per_position=per_position, masked=True, only=1, shares=[[2, 3, 4], [0, 2, 3]])
    three_by_kernels.check("ranks_of_different_types", masked=False, options={})


def test_kernels_in_all_else(two_by_kernels):
    two_by_kernels.check("sequences_of_different_lengths", seed=random.randrange(2**31), dtype="float32")
    two_by_kernels.check("not_finite_on_one_rank", value=float("nan"), options={})
    two_by_kernels.check("changed_in_place")
    two_by_kernels.check("without_gradient_of_the_input")
    two_by_kernels.check("net_against_one_process", seed=random.randrange(2**31), how="checkpoint", dtype="float32")
    for per_position in (True, False):
        two_by_kernels.check("collectives_are_one_each_way", masked=False, per_position=per_position)
