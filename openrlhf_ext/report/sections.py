"""What the report plots: names and captions of the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openrlhf_ext.ledger import FATES
from openrlhf_ext.prompt_pool import STATES
from openrlhf_ext.report.panels import TRAIN_POINTS, Lines, Stack, StepTime
from openrlhf_ext.report.runs import WARM_UP_SHARE

HOW_TO_READ = (
    "Lines are means over the finished seeds of a method and learning rate, or over all seeds where none has "
    "finished; bands go from the lowest to the highest seed. Thin dotted lines are the other runs. Stacked areas and "
    "bars put the learning rates of a method together. "
    f"Above {TRAIN_POINTS} train steps, points are means of neighboring steps."
)

_COLORS = ("#0072B2", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#8C8C8C", "#D55E00", "#882255", "#777711")
# In the order of FATES. Trained is blue, zero variance orange, failed red, pilots green and purple.
_FATE_COLORS = (
    *("#0072B2", "#E69F00", "#F4C56B", "#B87A00", "#56B4E9", "#8C8C8C"),
    *("#67000D", "#A50F15", "#D55E00", "#F28E6B"),
    *("#009E73", "#00573F", "#CC79A7", "#882255", "#7FCDBB", "#C2A5CF", "#5E3C99", "#D9D9D9"),
)


def _accuracy(name: str, x: str, x_label: str) -> Lines:
    return Lines(
        name,
        f"Accuracy against {x_label}",
        "Share of correct evaluation samples. Band of a single run: one standard error.",
        {"eval/accuracy": "accuracy"},
        kind="eval",
        x=x,
        x_label=x_label,
        error="eval/accuracy_se",
    )


SECTIONS: Mapping[str, Sequence[Lines | Stack | StepTime]] = {
    "Accuracy": (
        _accuracy("accuracy_rollouts", "budget/rollouts_generated", "generated rollouts"),
        _accuracy("accuracy_wall_clock", "train_wall_s", "seconds in train steps"),
        _accuracy("accuracy_steps", "step", "train steps"),
    ),
    "Where the rollouts went": (
        Stack(
            "fates",
            "Rollouts by fate",
            "Generated rollouts a train step, by what became of them.",
            "rollouts a step",
            "step/num_<fate>",
            {f"step/num_{fate}": fate for fate in FATES},
            _FATE_COLORS,
        ),
        Stack(
            "rows",
            "Trained rows by origin",
            "Shares of the trained rows that are fresh, fill a slot, or are replayed by themselves.",
            "share of rows",
            "rows/share_<origin>",
            {f"rows/share_{origin}": origin for origin in ("fresh", "filled", "replayed")},
            _COLORS,
        ),
    ),
    "Step time": (
        StepTime(
            "step_time",
            "Step time by phase",
            f"Median seconds of each phase, over the steps after the first {100 * WARM_UP_SHARE:.0f} %. The mark is "
            "the median of the whole step. Evaluation and checkpoints are not in a step.",
            _COLORS,
        ),
    ),
    "Replay": (
        Lines(
            "replay_age",
            "Replay age",
            "Mean age, in train steps, of replayed rows and of what the rollout buffer holds.",
            {
                "replay/age_mean": "filled groups",
                "rollout_replay/age_mean": "replayed rollouts",
                "rollout_buffer/age_mean": "stored rollouts",
            },
        ),
        Lines(
            "effective_sample_size",
            "Effective sample size",
            "Kish's effective sample size as a share of 1: of the importance weights of replayed tokens, and of the "
            "chances in a draw from the rollout buffer.",
            {
                "replay/effective_sample_frac": "filled groups",
                "rollout_replay/effective_sample_frac": "replayed rollouts",
                "rollout_buffer/draw_ess_frac": "draw",
            },
        ),
        Lines(
            "drift",
            "Capped weights and drift",
            "Share of replayed tokens whose importance weight is at the cap, and KL(behavior policy || policy at the "
            "start of the step) in nats a token.",
            {
                "replay/weight_capped_frac": "capped, filled",
                "rollout_replay/weight_capped_frac": "capped, replayed",
                "replay/behavior_kl": "KL, filled",
                "rollout_replay/behavior_kl": "KL, replayed",
            },
        ),
        Lines(
            "clip_fraction",
            "Clip fraction by origin",
            "Share of the tokens of each origin that get no gradient because of the clip.",
            {
                "fresh/ratio_clipped_frac": "fresh",
                "replay/ratio_clipped_frac": "filled groups",
                "rollout_replay/ratio_clipped_frac": "replayed rollouts",
            },
        ),
    ),
    "Prompt pool": (
        Stack(
            "pool",
            "Prompts by state",
            "Number of prompts in each state of the pool.",
            "prompts",
            "pool/num_<state>",
            {f"pool/num_{state}": state for state in STATES},
            _COLORS,
        ),
    ),
    "Diagnostics": (
        Lines(
            "distance",
            "Distance moved",
            "L2 distance of the parameters from the start, as a share of their norm at the start.",
            {"policy/distance_relative": "relative distance"},
            kind="eval",
        ),
        Lines(
            "gradient_norm",
            "Gradient norm",
            "L2 norm of the actor's gradient.",
            {"train/actor_grad_norm": "gradient norm"},
        ),
        Lines(
            "entropy",
            "Entropy",
            "Mean of -log p over the sampled tokens.",
            {"rollout/entropy_mean": "nats a token"},
        ),
        Lines(
            "effective_groups",
            "Effective groups",
            "Share of the generated, and of the trained, groups whose rewards differ.",
            {"groups/effective_frac_generated": "generated", "groups/effective_frac_trained": "trained"},
        ),
    ),
}
