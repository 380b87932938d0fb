"""Checks of the settings as a whole, run before anything starts: what is missing, contradicts itself or is not there.

Each problem is one ValueError that names the flags, their values and the way out. What OpenRLHF itself refuses is
left to its own checks, except where its message would be a traceback.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace

from openrlhf_ext.config import ExtConfig, PoolConfig
from openrlhf_ext.placement_needs import needs
from openrlhf_ext.prompts import PromptFile, read_prompts
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.settings import Settings, looks_local
from openrlhf_ext.survivors import PilotBounds

logger = logging.getLogger(__name__)

GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Advantage estimators whose baseline needs at least two rollouts of a prompt."""

_WEIGHTS = (".safetensors", ".bin", ".pt")


def check(settings: Settings) -> None:
    """Raises ValueError for the first problem found."""
    args, ext = settings.upstream, settings.ext
    _check_required(args)
    _check_supported(args)
    _check_images(args)
    _check_positive(settings)
    _check_sampling(args)
    _check_batches(args)
    _check_placement(args)
    _check_rounds(args, ext)
    _check_groups(args, ext)
    _check_fill(args, ext)
    _check_pilot(args, ext)
    _check_replay(args, ext)
    _check_success_replay(args, ext)
    _check_throttle(ext)
    _check_lengths(args)
    _check_agent(args)
    _check_lora(args)
    _check_precision(args, ext)
    _check_schedule(args, ext)
    _check_template(args)
    _check_mixture(args)
    _check_evaluation(args, ext)
    _check_checkpoints(args, ext)
    _check_files(args)
    _check_run_dir(args, ext)


def check_reward_file(settings: Settings) -> None:
    """Loads the reward file as the engines will, in a process of its own.

    Raises:
        ValueError: the file cannot be imported or defines no reward_func, with its error and line.
    """
    path = "" if settings.flat["train.agent_func_path"] else str(settings.flat["reward.remote_url"] or "")
    if path.endswith(".py") and settings.ext.reward.deadline_s > 0:
        RewardPool(path, settings.ext.reward.deadline_s, workers=1).close()


def read_prompt_files(settings: Settings) -> dict[str, PromptFile]:
    """Reads and checks the local ``.jsonl`` files of prompts.

    Returns:
        Flag (``data.prompt_dataset``, ``eval.dataset``) -> rows, for a flag that names one such file. Several under
        one flag are checked too, but left to OpenRLHF to load and mix, which cannot leave a row out.

    Raises:
        ValueError: bad rows with file:line; see `read_prompts`.
    """
    data = settings.upstream.data
    found: dict[str, PromptFile] = {}
    for key in ("data.prompt_dataset", "eval.dataset"):
        names = str(settings.flat[key] or "").split(",")
        for name in names:
            if Path(name).suffix != ".jsonl":
                continue
            file = read_prompts(
                name,
                data.input_key,
                data.label_key,
                settings.ext.data.on_bad_row if len(names) == 1 else "refuse",
                image_key=data.image_key,
                apply_chat_template=data.apply_chat_template,
            )
            if len(names) == 1:
                found[key] = file
    return found


def _check_required(args: SimpleNamespace) -> None:
    if not args.actor.model_name_or_path:
        raise ValueError("--actor.model_name_or_path is missing; give the folder or hub name of the model to train")
    if not args.data.prompt_dataset:
        raise ValueError("--data.prompt_dataset is missing; give a .jsonl file of prompts or the name of a data set")
    if not args.vllm.num_engines or args.vllm.num_engines < 0:
        raise ValueError(
            f"--vllm.num_engines must be at least 1, got {args.vllm.num_engines}; rollouts come from vLLM engines"
        )
    if not (args.reward.remote_url or args.train.agent_func_path):
        model = args.reward.model_name_or_path
        problem = "a reward model (--reward.model_name_or_path) is not supported" if model else "nothing gives rewards"
        raise ValueError(
            f"{problem}: rewards are verified when a rollout is generated; set --reward.remote_url to a .py file with "
            "reward_func (or a server's address), or --train.agent_func_path"
        )


def _check_supported(args: SimpleNamespace) -> None:
    if args.train.async_enable:
        raise ValueError(
            "--train.async_enable is not supported: the extensions need the synchronous trainer; remove the flag"
        )
    if args.use_ms:
        raise ValueError("--use_ms is not supported; download the model and give its folder")


def _check_images(args: SimpleNamespace) -> None:
    """What takes a model's images from their places; OpenRLHF refuses some of it itself, and a critic."""
    most = args.data.max_images_per_prompt
    if most < 0:
        raise ValueError(f"--data.max_images_per_prompt must be at least 0, which is none, got {most}")
    packs = "makes OpenRLHF pack rows end to end, which takes images from their places"
    for flag, on, problem in (
        ("--train.dynamic_batch_enable", args.train.dynamic_batch_enable, packs),
        (f"--ds.ring_attn_size {args.ds.ring_attn_size}", args.ds.ring_attn_size > 1, packs),
        ("--ds.use_liger_kernel", args.ds.use_liger_kernel, "has no vision models"),
    ):
        if most and on:
            raise ValueError(
                f"{flag} {problem}, so it does not go with --data.max_images_per_prompt {most}; remove it"
            )


def _check_positive(settings: Settings) -> None:
    for key in (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "rollout.micro_batch_size",
        "train.batch_size",
        "train.micro_batch_size",
        "train.num_episodes",
        "train.max_epochs",
        "actor.num_nodes",
        "actor.num_gpus_per_node",
        "ds.ring_attn_size",
        "ds.tensor_parallel_size",
        "eval.n_samples_per_prompt",
        "data.max_samples",
        "ckpt.max_num",
    ):
        value = settings.flat[key]
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"--{key} must be at least 1, got {value}")


def _check_sampling(args: SimpleNamespace) -> None:
    for key, value, fits, range_ in (
        ("rollout.temperature", args.rollout.temperature, args.rollout.temperature > 0, "above 0: logits are divided"),
        ("eval.temperature", args.eval.temperature, args.eval.temperature >= 0, "at least 0, which is greedy"),
        ("rollout.top_p", args.rollout.top_p, 0 < args.rollout.top_p <= 1, "above 0 and at most 1"),
    ):
        if not (math.isfinite(value) and fits):
            raise ValueError(f"--{key} must be {range_}, got {value:g}; 1 is usual")


def _check_batches(args: SimpleNamespace) -> None:
    """A train step must consist of whole optimizer steps, and those of whole micro-batches on every rank."""
    world_size = args.actor.num_nodes * args.actor.num_gpus_per_node
    ranks_per_copy = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    if world_size % ranks_per_copy:
        raise ValueError(
            f"--actor.num_nodes x --actor.num_gpus_per_node = {world_size} is not a multiple of --ds.ring_attn_size x "
            f"--ds.tensor_parallel_size = {ranks_per_copy}; change one of them"
        )
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if rollouts % args.train.batch_size:
        raise ValueError(
            f"--rollout.batch_size {args.rollout.batch_size} x --rollout.n_samples_per_prompt "
            f"{args.rollout.n_samples_per_prompt} = {rollouts} rollouts is not a multiple of --train.batch_size "
            f"{args.train.batch_size}; --train.batch_size {_divisor(rollouts, args.train.batch_size)} would fit"
        )
    micro = args.train.micro_batch_size * (world_size // ranks_per_copy)
    if args.train.batch_size % micro:
        raise ValueError(
            f"--train.batch_size {args.train.batch_size} is not a multiple of --train.micro_batch_size "
            f"{args.train.micro_batch_size} x {world_size // ranks_per_copy} data-parallel ranks = {micro}; change "
            "--train.micro_batch_size or --train.batch_size"
        )


def _check_placement(args: SimpleNamespace) -> None:
    """What shares the actor's GPUs must fit onto them. OpenRLHF asserts part of it, after engines have started."""
    actor, *others = needs(args)
    for need in others:
        if min(need.blocks, need.size) < 1:
            raise ValueError(f"{need.flags}: both must be at least 1")
        if not need.shared:
            continue
        flag = "--train.colocate_all" if args.train.colocate_all else "--train.colocate_actor_ref"
        shared = f"{need.flags} with {flag}, which puts them on the GPUs of {actor.flags}"
        if need.what == "vllm" and need.gpus != actor.gpus:
            raise ValueError(
                f"{shared}: {need.gpus} GPUs for engines, {actor.gpus} for the actor; make them the same number, with "
                f"--vllm.num_engines {actor.gpus // need.size or 1} for example"
            )
        if need.what == "vllm" and actor.blocks > 1 and actor.size % need.size:
            raise ValueError(
                f"{shared}: an engine would be on two nodes; use a --vllm.tensor_parallel_size that divides "
                f"{actor.size}"
            )
        # OpenRLHF wants the same of the reference model; a critic may have fewer.
        same = (need.blocks, need.size) == (actor.blocks, actor.size)
        if (need.what == "ref" and not same) or (need.what == "critic" and need.gpus > actor.gpus):
            raise ValueError(
                f"{shared}: give both the same, --{need.what}.num_nodes {actor.blocks} "
                f"--{need.what}.num_gpus_per_node {actor.size}"
            )


def _divisor(total: int, near: int) -> int:
    """The divisor of `total` closest to `near`, the larger of two."""
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    return min(divisors, key=lambda number: (abs(number - near), -number))


def _check_rounds(args: SimpleNamespace, ext: ExtConfig) -> None:
    batch = args.rollout.batch_size
    for name, part in (("dapo", ext.dapo), ("pilot", ext.pilot)):
        if part is None:
            continue
        prompts = part.prompts_per_round or 3 * batch
        if prompts * part.max_rounds < batch:
            raise ValueError(
                f"--ext.{name}.prompts_per_round {prompts} x --ext.{name}.max_rounds {part.max_rounds} is less than "
                f"--rollout.batch_size {batch}, so that no batch could be full; raise one of them"
            )


def _check_groups(args: SimpleNamespace, ext: ExtConfig) -> None:
    if args.algo.dynamic_filtering_enable:
        drops = ext.groups is not None and ext.groups.ineffective == "drop"
        for flag, on, what in (
            ("--ext.dapo", ext.dapo is not None, "filter groups"),
            ("--ext.pilot", ext.pilot is not None, "filter groups"),
            ("--ext.fill", ext.fill is not None, "handle zero-variance groups"),
            ("--ext.replay", ext.replay is not None, "handle zero-variance groups"),
            ("--ext.success_replay", ext.success_replay is not None, "handle zero-variance groups"),
            ("--ext.groups.ineffective drop", drops, "filter groups"),
        ):
            if on:
                raise ValueError(
                    f"{flag} and --algo.dynamic_filtering_enable both {what}; remove --algo.dynamic_filtering_enable"
                )
    if args.rollout.n_samples_per_prompt > 1:
        return
    for flag, on in (
        (f"--algo.advantage.estimator {args.algo.advantage.estimator}", _has_group_baseline(args)),
        ("--ext.dapo", ext.dapo is not None),
        ("--ext.pilot", ext.pilot is not None),
        ("--ext.groups", ext.groups is not None),
    ):
        if on:
            raise ValueError(
                f"--rollout.n_samples_per_prompt must be at least 2 with {flag}, got 1: one rollout never varies; "
                "8 is usual"
            )


def _has_group_baseline(args: SimpleNamespace) -> bool:
    return args.algo.advantage.estimator in GROUP_ESTIMATORS


def _check_fill(args: SimpleNamespace, ext: ExtConfig) -> None:
    if ext.fill is None:
        return
    estimator, fits = args.algo.advantage.estimator, ("group_norm", "rloo", "dr_grpo", "gae")
    if ext.groups is None:
        raise ValueError("--ext.fill needs --ext.groups, which says what an informative group is; add groups: {}")
    if estimator not in fits:
        raise ValueError(
            f"--ext.fill does not go with --algo.advantage.estimator {estimator}, whose baseline or scale is over "
            f"the whole batch, so that replayed rollouts would change the advantages of fresh ones; use one of "
            f"{', '.join(fits)}"
        )
    if args.actor.policy_loss_type != "ppo":
        raise ValueError(
            f"--ext.fill does not go with --actor.policy_loss_type {args.actor.policy_loss_type}: its ratio is for "
            "a whole sequence, the weight of replayed tokens is one for each token; use --actor.policy_loss_type ppo"
        )
    if ext.fill.store == "all" and estimator == "gae":
        raise ValueError(
            "--ext.fill.store all does not go with --algo.advantage.estimator gae, which normalizes advantages over "
            "groups that are stored but not trained; use another estimator or --ext.fill.store effective"
        )
    batch, too_young = args.rollout.batch_size, (ext.fill.min_age - 1) * args.rollout.batch_size
    if ext.fill.max_frac * batch < 1:
        raise ValueError(
            f"--ext.fill.max_frac {ext.fill.max_frac:g} of --rollout.batch_size {batch} groups is less than one, so "
            "that nothing would be filled; raise it, or use --ext.fill null"
        )
    if ext.fill.capacity is not None and ext.fill.capacity <= too_young:
        logger.warning(
            "--ext.fill.capacity %d: after %d steps of informative groups alone the buffer holds only groups younger "
            "than --ext.fill.min_age %d, which fill nothing; give more than %d, or null",
            ext.fill.capacity,
            ext.fill.min_age - 1,
            ext.fill.min_age,
            too_young,
        )


def _check_pilot(args: SimpleNamespace, ext: ExtConfig) -> None:
    pilot = ext.pilot
    if pilot is None:
        if ext.pool != PoolConfig():
            raise ValueError(
                "--ext.pool needs --ext.pilot: only pilots say which prompts are solved; remove --ext.pool"
            )
        return
    size = args.rollout.n_samples_per_prompt
    n_pilot = pilot.pilots_per_prompt(size)
    shown = f"--ext.pilot.n_pilot {n_pilot}" + (f" (a quarter of {size})" if pilot.n_pilot is None else "")
    if ext.dapo is not None:
        raise ValueError("--ext.pilot and --ext.dapo both decide which prompts are trained; remove one of the two")
    if pilot.n_effective is not None and pilot.commit_only:
        raise ValueError("--ext.pilot.n_effective trains pilots, --ext.pilot.commit_only trains none; remove one")
    if pilot.n_effective is not None and pilot.n_effective > n_pilot:
        raise ValueError(f"--ext.pilot.n_effective {pilot.n_effective} is more than {shown}; give at most {n_pilot}")
    if pilot.pilots_per_group(size) >= size:
        raise ValueError(
            f"{shown} leaves no rollout to commit of --rollout.n_samples_per_prompt {size}; a quarter is usual"
        )
    bounds = PilotBounds.of(pilot, n_pilot)
    if bounds.lower > bounds.upper:
        raise ValueError(
            f"{shown}: no number of correct pilots is an accuracy from --ext.pilot.p_lower {pilot.p_lower:g} to "
            f"--ext.pilot.p_upper {pilot.p_upper:g}, so that no prompt would be committed; use more pilots or wider "
            "thresholds"
        )
    batch = args.rollout.batch_size
    if pilot.max_survivors is not None and pilot.max_survivors < batch:
        raise ValueError(
            f"--ext.pilot.max_survivors {pilot.max_survivors}: fewer prompts could wait than a batch commits "
            f"(--rollout.batch_size {batch}); set at least {batch}"
        )


def _check_replay(args: SimpleNamespace, ext: ExtConfig) -> None:
    """Refuses whatever would make an advantage more than one number of a rollout's own group, kept for good."""
    if ext.replay is None:
        return
    if ext.groups is None:
        raise ValueError("--ext.replay needs --ext.groups, which says what an informative group is; add groups: {}")
    estimator, fits = args.algo.advantage.estimator, ("group_norm", "rloo", "dr_grpo")
    if estimator not in fits:
        raise ValueError(
            f"--ext.replay does not go with --algo.advantage.estimator {estimator}: a replayed rollout keeps one "
            "advantage, which must come from its own group and from no value model or whole batch; use one of "
            f"{', '.join(fits)}"
        )
    if args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss:
        raise ValueError(
            f"--ext.replay does not go with --algo.kl.init_coef {args.algo.kl.init_coef:g} in the reward, which gives "
            "each token an advantage of its own; set --algo.kl.init_coef 0, or --algo.kl.use_loss"
        )
    if args.actor.policy_loss_type != "ppo":
        raise ValueError(
            f"--ext.replay does not go with --actor.policy_loss_type {args.actor.policy_loss_type}: its ratio is for "
            "a whole sequence, that of replayed tokens is one for each token; use --actor.policy_loss_type ppo"
        )
    if ext.replay.composition == "pool" and ext.groups.ineffective == "keep":
        raise ValueError(
            "--ext.replay.composition pool draws the whole batch from informative rollouts, but --ext.groups."
            "ineffective keep trains the others, too; use --ext.groups.ineffective drop"
        )
    if ext.replay.composition == "pool" and ext.fill is not None:
        raise ValueError(
            "--ext.replay.composition pool draws the whole batch, which leaves no slots for --ext.fill; use "
            "--ext.replay.composition fresh_anchored or --ext.fill null"
        )


def _check_success_replay(args: SimpleNamespace, ext: ExtConfig) -> None:
    if ext.success_replay is None:
        return
    for flag, part in (("--ext.fill", ext.fill), ("--ext.dapo", ext.dapo), ("--ext.pilot", ext.pilot)):
        if part is not None:
            raise ValueError(f"--ext.success_replay and {flag} both decide what becomes of failed groups; remove one")
    if ext.replay is not None:
        raise ValueError(
            "--ext.success_replay makes groups of two policies, which --ext.replay cannot store; remove one of them"
        )
    if not _has_group_baseline(args):
        raise ValueError(
            f"--ext.success_replay does not go with --algo.advantage.estimator {args.algo.advantage.estimator}, which "
            f"has no baseline of a group for a success to stand out from; use one of {', '.join(GROUP_ESTIMATORS)}"
        )


def _check_throttle(ext: ExtConfig) -> None:
    if ext.throttle is None:
        return
    if ext.fill is None and ext.replay is None:
        raise ValueError("--ext.throttle has nothing to act on without --ext.fill or --ext.replay; remove it")
    if ext.replay is not None and ext.replay.composition == "pool":
        raise ValueError(
            "--ext.throttle cannot act on --ext.replay.composition pool, where a draw decides how much is replayed; "
            "remove it"
        )


def _check_lengths(args: SimpleNamespace) -> None:
    if args.rollout.max_new_tokens is not None and not 1 <= args.rollout.max_new_tokens < args.data.max_len:
        raise ValueError(
            f"--rollout.max_new_tokens must be in [1, {args.data.max_len - 1}] so that there is room for a prompt "
            f"(--data.max_len is {args.data.max_len}), got {args.rollout.max_new_tokens}"
        )
    overlong = args.reward.overlong_buffer_len
    if overlong is not None and not 0 < overlong <= (args.rollout.max_new_tokens or 0):
        raise ValueError(
            f"--reward.overlong_buffer_len {overlong:g} must be above 0 and at most --rollout.max_new_tokens, which "
            f"is {args.rollout.max_new_tokens}; set that, or remove the penalty"
        )
    factor = args.reward.overlong_penalty_factor
    if overlong is not None and not 0 < factor < math.inf:
        raise ValueError(f"--reward.overlong_penalty_factor must be above 0, or long answers gain, got {factor:g}")
    truncated = args.reward.stop_properly_penalty_coef
    if truncated is not None and truncated > 1:
        raise ValueError(
            f"--reward.stop_properly_penalty_coef must be a factor up to 1, or a negative reward, got {truncated:g}"
        )


def _check_agent(args: SimpleNamespace) -> None:
    agent, reward = args.train.agent_func_path, args.reward.remote_url
    if not agent:
        return
    if not agent.endswith(".py"):
        raise ValueError(f"--train.agent_func_path {agent} must be a .py file that defines AgentExecutor")
    if reward:
        logger.warning(
            "--reward.remote_url %s is not used: with --train.agent_func_path the agent gives rewards", reward
        )


def _check_precision(args: SimpleNamespace, ext: ExtConfig) -> None:
    if ext.fp32 and args.ds.attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"--ext.fp32 does not go with --ds.attn_implementation {args.ds.attn_implementation}, which computes in "
            "bfloat16 or float16 only; set it to sdpa"
        )


def _check_lora(args: SimpleNamespace) -> None:
    """LoRA only where the weights of the whole model can be had: engines know no adapters."""
    if args.ds.load_in_4bit:
        raise ValueError("--ds.load_in_4bit is not supported: vLLM engines take whole weights only; remove it")
    lora = args.ds.lora
    if lora.rank == 0:
        return
    for name, value, fits, range_ in (
        ("rank", lora.rank, lora.rank > 0, "at least 0, which is off"),
        ("alpha", lora.alpha, lora.alpha > 0, "above 0, or nothing is trained"),
        ("dropout", lora.dropout, 0 <= lora.dropout < 1, "at least 0 and below 1"),
    ):
        if not fits:
            raise ValueError(f"--ds.lora.{name} must be {range_}, got {value:g}")
    for flag, on, way_out in (
        ("--ds.zero_stage 3", args.ds.zero_stage == 3, "use --ds.zero_stage 2"),
        (f"--ds.tensor_parallel_size {args.ds.tensor_parallel_size}", args.ds.tensor_parallel_size > 1, "use 1"),
        ("--train.enable_ema", args.train.enable_ema, "remove it"),
    ):
        if on:
            raise ValueError(
                f"--ds.lora.rank {lora.rank} does not go with {flag}: each process must hold its layers "
                f"whole, and the trained model be the only one; {way_out}, or train without LoRA"
            )


def _check_schedule(args: SimpleNamespace, ext: ExtConfig) -> None:
    """What is counted in steps or rollouts must happen within the run, as far as its length is known here."""
    for key, value in (("eval.steps", args.eval.steps), ("ckpt.save_steps", args.ckpt.save_steps)):
        if value != -1 and value < 1:
            raise ValueError(f"--{key} must be at least 1, or -1 for never, got {value}")
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if ext.max_rollouts is not None and ext.max_rollouts < rollouts:
        raise ValueError(
            f"--ext.max_rollouts {ext.max_rollouts} is less than one step of --rollout.batch_size "
            f"{args.rollout.batch_size} x --rollout.n_samples_per_prompt {args.rollout.n_samples_per_prompt} = "
            f"{rollouts} rollouts; raise it, or make the batch smaller"
        )
    if ext.max_steps is None:
        return
    for flag, value in (
        ("--ext.replay.warmup_steps", ext.replay and ext.replay.warmup_steps),
        ("--ext.fill.min_age", ext.fill and ext.fill.min_age),
    ):
        if value is not None and value >= ext.max_steps:
            raise ValueError(
                f"{flag} {value} is not over within the run of --ext.max_steps {ext.max_steps}, so that nothing would "
                "be replayed; lower it, or train longer"
            )


def _check_template(args: SimpleNamespace) -> None:
    """OpenRLHF builds a prompt by ``template.format(input)``, so every brace but the one ``{}`` has to be doubled."""
    template = args.data.input_template
    if template is None:
        return
    flag = f"--data.input_template {template!r}"
    if args.data.apply_chat_template:
        raise ValueError(f"{flag} would be ignored with --data.apply_chat_template; remove one of the two")
    if "{}" not in template:
        raise ValueError(f"{flag} has no {{}}, where the prompt goes; add it")
    try:
        template.format("")
    except (IndexError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"{flag} has braces besides the one {{}} where the prompt goes; double the other braces, as in "
            r"\boxed{{}}"
        ) from None


def _check_mixture(args: SimpleNamespace) -> None:
    """The shares of several data sets; OpenRLHF's message would be an assertion without words."""
    shares, names = args.data.prompt_probs, args.data.prompt_dataset.split(",")
    if shares is None:
        return
    try:
        values = [float(share) for share in shares.split(",")]
    except ValueError:
        values = []
    if len(values) != len(names) or min(values) < 0 or not math.isclose(sum(values), 1.0, abs_tol=1e-8):
        raise ValueError(
            f"--data.prompt_probs {shares} must be one number for each of the {len(names)} data sets of "
            "--data.prompt_dataset, separated by commas, with a sum of 1"
        )


def _check_evaluation(args: SimpleNamespace, ext: ExtConfig) -> None:
    if not args.eval.dataset:
        for flag in ("every_rollouts", "final_samples"):
            if getattr(ext.eval, flag) is not None:
                raise ValueError(
                    f"--ext.eval.{flag} {getattr(ext.eval, flag)} has nothing to evaluate; give --eval.dataset, or "
                    "remove it"
                )
        if args.eval.steps != -1:
            logger.warning("--eval.steps %d has nothing to evaluate without --eval.dataset", args.eval.steps)
        return
    samples, largest = args.eval.n_samples_per_prompt, max(ext.eval.pass_at)
    if max(samples, ext.eval.final_samples or 0) < largest:
        kept = " ".join(str(k) for k in ext.eval.pass_at if k <= samples) or "1"
        raise ValueError(
            f"pass@{largest} needs at least {largest} samples, but --eval.n_samples_per_prompt is {samples}; set "
            f"--eval.n_samples_per_prompt {largest} or --ext.eval.pass_at {kept}"
        )


def _check_checkpoints(args: SimpleNamespace, ext: ExtConfig) -> None:
    resumes = "--ext.resume auto" if ext.resume == "auto" else "--ckpt.load_enable" if args.ckpt.load_enable else None
    if resumes and args.ckpt.disable_ds:
        raise ValueError(
            f"{resumes} goes on from checkpoints that --ckpt.disable_ds does not write; remove one of the two"
        )
    if resumes and args.train.enable_ema:
        raise ValueError(
            f"{resumes} with --train.enable_ema would lose the averaged model, which OpenRLHF's checkpoints do not "
            "hold; remove one of the two"
        )


def _check_files(args: SimpleNamespace) -> None:
    places = {
        "reward.remote_url": (args.reward.remote_url, "file"),
        "train.agent_func_path": (args.train.agent_func_path, "file"),
        "data.prompt_dataset": (args.data.prompt_dataset, "file or folder"),
        "eval.dataset": (args.eval.dataset, "file or folder"),
        "actor.model_name_or_path": (args.actor.model_name_or_path, "folder"),
        "critic.model_name_or_path": (args.critic.model_name_or_path, "folder"),
        "reward.model_name_or_path": (args.reward.model_name_or_path, "folder"),
    }
    for key, (names, kind) in places.items():
        for name in (names or "").split(","):
            path = Path(name.partition("@")[0])
            found = (path.is_file() and "file" in kind) or (path.is_dir() and "folder" in kind)
            if looks_local(name) and not found:
                raise ValueError(
                    f"--{key}: there is no {kind} {path}; check the path (a relative one starts at the current folder)"
                )
            if looks_local(name) and kind == "folder" and not (path / "config.json").is_file():
                raise ValueError(
                    f"--{key}: {path} has no config.json, so it is no model in the Hugging Face format; give the "
                    "folder that save_pretrained wrote"
                )
            if looks_local(name) and kind == "folder" and not any(file.suffix in _WEIGHTS for file in path.iterdir()):
                raise ValueError(
                    f"--{key}: {path} has no weights ({', '.join(_WEIGHTS)}); copy or download the model again"
                )


def _check_run_dir(args: SimpleNamespace, ext: ExtConfig) -> None:
    run_dir = Path(ext.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"--ext.run_dir {run_dir} is a file; name a directory")
    if (run_dir / "metrics.jsonl").exists() and not args.ckpt.load_enable and ext.resume == "never":
        raise ValueError(
            f"--ext.run_dir {run_dir} already holds a run, which would be overwritten; give another directory, or "
            "--ext.resume auto to go on with that run"
        )
