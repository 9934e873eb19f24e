"""`deltarunner compare`: paired by task, checked against results of scipy and statsmodels, and by simulation."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import RunFile, Task
from runner.cli.app import app
from runner.errors import BadOption
from runner.estimates import Mean, pass_all_k, pass_at_k, student_t_p_value, student_t_quantile
from runner.report.comparison import compare
from runner.report.overview import interval_of, overview_of
from runner.report.page import write_report
from runner.report.paired import Decision, _exact_p_value, clustered_difference, paired_difference
from runner.trajectory import Outcome, Trajectory
from tests import sweeps
from tests.report.browser import browser, browser_sample, needs_browser
from tests.report.playing import store
from tests.store.building import played

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]

SCIPY = json.loads((Path(__file__).parent / "scipy_reference.json").read_text())
STATSMODELS = json.loads((Path(__file__).parent / "statsmodels_reference.json").read_text())


# --- statistics


def test_paired_t_test_agrees_with_scipy() -> None:
    for case in SCIPY["paired"]:
        made = paired_difference("reward", [tuple(pair) for pair in case["pairs"]])
        assert (made.low, made.high) == pytest.approx((case["low"], case["high"]), 1e-9)
        exact = _exact_p_value([second - first for first, second in case["pairs"]])
        assert made.p_value == pytest.approx(max(case["p_value"], exact), 1e-9)


@pytest.mark.parametrize("tasks", range(2, 10))
def test_equal_changes_of_few_tasks_are_not_decisive(tasks: int) -> None:
    made = paired_difference("reward", [(1.0, 0.0)] * tasks)
    assert made.p_value == pytest.approx(2 / 2**tasks)
    assert (made.decision is Decision.UNDECIDED) == (tasks < 6)
    assert made.more_tasks == (6 - tasks if tasks < 6 else None)


@pytest.mark.parametrize("tasks", [2, 3, 5, 8, 12])
def test_equal_models_are_rarely_found_different(tasks: int) -> None:
    drawn = sweeps.random_of(f"equal models {tasks}")
    rounds = sweeps.times(4000, 400)
    decided = 0
    for _ in range(rounds):
        pairs = [(float(drawn.random() < 0.5), float(drawn.random() < 0.5)) for _ in range(tasks)]
        decided += paired_difference("reward", pairs).decision is not Decision.UNDECIDED
    assert decided / rounds < 0.07


def test_largest_rewards_are_compared() -> None:
    made = paired_difference("reward", [(1e300, -1e300), (-1e300, 1e300), (0.0, 1e308)])
    assert made.decision is Decision.UNDECIDED


def test_student_t_agrees_with_scipy() -> None:
    for t, degrees, p_value in SCIPY["p_values"]:
        assert student_t_p_value(t, degrees) == pytest.approx(p_value, rel=1e-9, abs=1e-300)
    for degrees, quantile in SCIPY["quantiles"]:
        assert student_t_quantile(0.95, degrees) == pytest.approx(quantile, rel=1e-9)


def test_clustered_means_agree_with_statsmodels() -> None:
    for case in STATSMODELS["means"]:
        mean = Mean()
        for task, value in case["values"]:
            mean.add(value, task)
        assert (mean.mean, mean.standard_error) == pytest.approx((case["mean"], case["error"]), rel=1e-9)
        half = interval_of(mean.as_dict())
        assert half is not None
        assert (mean.mean - half, mean.mean + half) == pytest.approx((case["low"], case["high"]), rel=1e-9)


def test_clustered_differences_agree_with_statsmodels() -> None:
    for case in STATSMODELS["differences"]:
        difference, error, _ = clustered_difference(case["first"], case["second"])
        assert (difference, error) == pytest.approx((case["difference"], case["error"]), rel=1e-9)


@pytest.mark.parametrize("tasks", [12, pytest.param(40, marks=pytest.mark.whole)])
def test_interval_covers_the_truth_on_clustered_data(tasks: int) -> None:
    draw = random.Random(tasks)
    covered, rounds = 0, 2_000
    for _ in range(rounds):
        pairs = []
        for _ in range(tasks):
            hard = draw.random()  # episodes of a task share its difficulty
            chances = hard, min(1.0, max(0.0, hard + 0.2 * (draw.random() - 0.5)))
            counts = draw.randrange(1, 7), draw.randrange(1, 7)
            first, second = (
                sum(draw.random() < chance for _ in range(count)) / count
                for chance, count in zip(chances, counts, strict=True)
            )
            pairs.append((first, second))
        made = paired_difference("reward", pairs)
        assert made.low is not None
        assert made.high is not None
        covered += made.low <= 0 <= made.high  # both runs have the same expected reward
    assert 0.93 <= covered / rounds <= 0.97


@pytest.mark.parametrize("tasks", [15, 40])
def test_interval_of_one_run_covers_the_truth_on_clustered_data(tasks: int) -> None:
    draw = random.Random(tasks)
    covered, rounds = 0, 2_000
    for _ in range(rounds):
        mean = Mean()
        for task in range(tasks):
            hard = draw.random()
            for _ in range(4):
                mean.add(float(draw.random() < hard), str(task))
        half = interval_of(mean.as_dict())
        assert half is not None
        covered += abs(mean.mean - 0.5) <= half
    assert 0.93 <= covered / rounds <= 0.97


@pytest.mark.whole
def test_further_tasks_decide_as_often_as_promised() -> None:
    draw = random.Random(3)
    pilot = paired_difference("reward", [(0.0, draw.gauss(0.2, 1)) for _ in range(30)])
    assert pilot.more_tasks is not None
    size = pilot.tasks + pilot.more_tasks
    assert pilot.high is not None
    assert pilot.low is not None
    spread = (pilot.high - pilot.low) / 2 / student_t_quantile(0.95, 29) * 30**0.5
    rounds = 300
    decided = sum(
        paired_difference("r", [(0.0, draw.gauss(pilot.difference, spread)) for _ in range(size)]).decision
        is Decision.HIGHER
        for _ in range(rounds)
    )
    assert 0.7 <= decided / rounds <= 0.9


def test_pass_at_k_and_pass_all_k_are_unbiased() -> None:
    draw = random.Random(1)
    chance, n, k = 0.3, 5, 2
    solved: dict[tuple[int, int], int] = {}
    for _ in range(20_000):
        key = n, sum(draw.random() < chance for _ in range(n))
        solved[key] = solved.get(key, 0) + 1
    assert pass_at_k(solved, k) == pytest.approx(1 - (1 - chance) ** k, abs=0.01)
    assert pass_all_k(solved, k) == pytest.approx(chance**k, abs=0.01)
    assert pass_all_k({(4, 4): 1, (4, 2): 1}, 2) == (1 + 1 / 6) / 2
    assert pass_all_k({(2, 1): 1}, 3) is None


# --- files


async def two(folder: Path, count: int = 20, *, losing: int = 15, **header: Any) -> tuple[Path, Path]:
    """Run A solves every task, and run B fails at the first ones."""
    levels = ("easy", "hard")
    tasks = [Task(id=f"t{n}", prompt="?", info={"level": levels[n % 2]}) for n in range(count)]
    first = await store(folder / "a.db", [played(task) for task in tasks])
    rewards = [float(number >= losing) for number in range(count)]
    second = [played(task, reward=reward) for task, reward in zip(tasks, rewards, strict=True)]
    return first, await store(folder / "b.db", second, **header)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


async def test_better_file_lost_tasks_and_settings_are_named(tmp_path: Path) -> None:
    first, second = await two(tmp_path, sampling={"temperature": 0.5})
    made = compare(first, second)
    assert made.better == "A"
    words = "A is better: the reward of B is lower by 0.75 (95% interval -0.958 to -0.542), which is decisive"
    assert made.verdict == words
    assert [each.task_id for each in made.flipped] == [f"t{n}" for n in range(15)]
    assert all(each.lost for each in made.flipped)
    assert ("sampling.temperature", "(not set)", "0.5") in made.configuration
    code, text = run(first, second)
    assert code == 0
    for words in ("A is better", "B lost 15 tasks", "t0: 100% -> 0%, such as t0-0-0", "sampling.temperature"):
        assert words in text


async def test_undecided_comparison_estimates_how_many_tasks_would_decide(tmp_path: Path) -> None:
    first, second = await two(tmp_path, 10, losing=1)
    reward = compare(first, second).differences[0]
    assert reward.decision is Decision.UNDECIDED
    assert reward.words.startswith("not decisive: about ")
    assert "more tasks would decide" in run(first, second)[1]


async def test_equal_files_are_not_decisive(tmp_path: Path) -> None:
    first, _ = await two(tmp_path)
    made = compare(first, first)
    assert (made.better, made.flipped, made.configuration) == ("", (), ())
    assert made.verdict == "not decisive: no difference was seen"


async def test_slices_follow_a_field_of_the_task(tmp_path: Path) -> None:
    first, second = await two(tmp_path, losing=20)
    with RunFile(first) as a, RunFile(second) as b:
        made = compare(a, b, by="level")
        assert len(a) == 20  # the caller's file stays open
    slices = [(each.metric, each.slice, each.tasks, each.difference) for each in made.slices]
    assert slices[:2] == [("reward", "easy", 10, -1), ("reward", "hard", 10, -1)]
    assert {metric for metric, *_ in slices} == {each.metric for each in made.differences}
    assert re.search(r"metric\s+slice\s+A(.|\n)*sampled\s+easy", run(first, second, "--by", "level")[1])
    code, text = run(first, second, "--by", "colour")
    assert code == 2
    assert "no task has this field; give one of answer, id, level" in text


async def test_files_without_a_common_task_are_refused_in_words(tmp_path: Path) -> None:
    first = await store(tmp_path / "a.db", [played("x")])
    second = await store(tmp_path / "b.db", [played("y")])
    with pytest.raises(BadOption, match=r"no task in common.*'x'.*'y'"):
        compare(first, second)
    empty = await store(tmp_path / "c.db", [])
    with pytest.raises(BadOption, match="no finished episodes"):
        compare(first, empty)
    assert run(first)[0] == 2
    assert run(first, tmp_path / "missing.db")[0] == 7


async def test_different_scorers_have_no_common_reward(tmp_path: Path) -> None:
    first, _ = await two(tmp_path)
    other = played("t0")
    other.rewards = {"correct": 1.0, "style": 0.5}
    third = await store(tmp_path / "c.db", [other, played("t1")])
    made = compare(first, third)
    assert "reward" not in [each.metric for each in made.differences]
    assert "reward correct" in [each.metric for each in made.differences]
    assert "The scorers differ (A: correct; B: correct, style)" in " ".join(made.notes)


async def test_failed_missing_and_single_episodes_are_noted(tmp_path: Path) -> None:
    first = await store(tmp_path / "a.db", [played("x"), played("y"), played("z")])
    second = await store(tmp_path / "b.db", [played("x"), played("y", outcome=Outcome.ENV_ERROR)])
    made = compare(first, second)
    notes = " ".join(made.notes)
    assert "1 task is only in A and left out" in notes
    assert "1 of 2 episodes of B failed and have no reward" in notes
    assert "1 task has only failed episodes in B: y." in notes
    assert "Each task was played once, with one seed" in notes
    assert made.differences[0].words == "not decisive: an interval needs two tasks"


def failed(task: str) -> Trajectory:
    return played(task, outcome=Outcome.ENV_ERROR)


async def test_tasks_that_only_fail_are_lost_and_counted(tmp_path: Path) -> None:
    first = await store(tmp_path / "a.db", [played(f"t{n}") for n in range(20)])
    second = await store(tmp_path / "b.db", [failed(f"t{n}") if n < 12 else played(f"t{n}") for n in range(20)])
    made = compare(first, second)
    by_name = {each.metric: each for each in made.differences}
    assert (by_name["reward"].tasks, by_name["reward"].difference) == (8, 0)
    assert (by_name["failed"].tasks, by_name["failed"].second) == (20, 0.6)
    assert by_name["solved (failed episodes count as not solved)"].decision is Decision.LOWER
    assert [(each.task_id, each.second, each.lost) for each in made.flipped] == [
        (f"t{n}", None, True) for n in range(12)
    ]
    text = run(first, second)[1]
    assert "12 tasks have only failed episodes in B: t0, t1, t2, t3, t4, ..." in text
    assert "t0: 100% -> no score" in text


async def test_failures_that_hide_a_loss_leave_no_winner(tmp_path: Path) -> None:
    """Run B solves more of the episodes that it finishes, but fails at tasks that A solves."""
    tasks = [f"t{n}" for n in range(20)]
    first = await store(tmp_path / "a.db", [played(task, reward=float(n >= 10)) for n, task in enumerate(tasks)])
    breaking = [failed(task) if 8 <= n < 16 else played(task) for n, task in enumerate(tasks)]
    made = compare(first, await store(tmp_path / "b.db", breaking))
    assert made.differences[0].decision is Decision.HIGHER
    assert made.better == ""
    assert made.verdict.startswith("not decisive, as it depends on the failed episodes. Without them: decisive: B is")


async def test_file_of_failures_has_no_score_and_the_same_scorers(tmp_path: Path) -> None:
    first, _ = await two(tmp_path)
    broken = await store(tmp_path / "c.db", [failed(f"t{n}") for n in range(20)])
    for files in ((first, broken), (broken, first)):
        made = compare(*files)
        assert made.better == ""
        assert not any("scorers" in note for note in made.notes)
    made = compare(first, broken)
    assert "No episode of B has a score: all 20 failed." in made.notes
    assert len(made.flipped) == 20
    assert "no task has a score in both files" in made.verdict


async def test_shown_episodes_of_a_flipped_task_show_the_flip(tmp_path: Path) -> None:
    def episodes(rewards: tuple[float, ...]) -> list[Trajectory]:
        return [played("t", index, reward=reward) for index, reward in enumerate(rewards)] + [played("other")]

    first = await store(tmp_path / "a.db", episodes((0, 1, 1)))
    second = await store(tmp_path / "b.db", episodes((1, 0, 0)))
    (task,) = compare(first, second).flipped
    with RunFile(first) as a, RunFile(second) as b:
        assert a.row(task.episodes[0]).reward == 1
        assert b.row(task.episodes[1]).reward == 0


async def test_task_without_a_reward_has_not_flipped(tmp_path: Path) -> None:
    first = await store(tmp_path / "a.db", [played("x"), played("y")])
    second = await store(tmp_path / "b.db", [played("x", reward=None), played("y")])
    made = compare(first, second)
    assert made.flipped == ()
    assert not any("failed" in note for note in made.notes)


async def test_flipped_episodes_are_in_a_small_page(tmp_path: Path) -> None:
    first, second = await two(tmp_path, 40, losing=20)
    target = tmp_path / "page.html"
    for most, lost in ((25, 20), (10, 10)):
        with RunFile(second) as run_file:
            written = write_report(run_file, target, most=most, comparison=compare(first, run_file))
        assert written.episodes == most
        text = target.read_text()
        linked = set(re.findall(r'href="#(e-[^"]*)"', text))
        assert sum(f"e-t{number}-0-0" in linked for number in range(20)) == lost
        assert linked <= set(re.findall(r'id="(e-[^"]*)"', text))


@pytest.mark.parametrize(
    ("task", "drifts"),
    [
        (lambda number: number, True),  # each episode has another task
        (lambda number: number % 3, True),  # the same three tasks during the whole run
        (lambda number: number // 20, False),  # each third of the run has one task
        (lambda number: number // 20 * 6 + number % 6, True),  # each third has six tasks with equal rewards
    ],
)
async def test_drift_is_clustered_by_task(task: Callable[[int], int], drifts: bool, tmp_path: Path) -> None:
    episodes = [played(f"t{task(n)}", n, reward=float(n >= 40)) for n in range(60)]
    with RunFile(await store(tmp_path / "a.db", episodes)) as run_file:
        drift = overview_of(run_file).drift
    assert [each.partition(":")[0] for each in drift] == (["reward"] if drifts else [])


async def test_hard_tasks_at_the_end_are_not_drift(tmp_path: Path) -> None:
    """The thirds differ by four standard errors of episodes, but only by about one of tasks."""
    solved = (1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1)
    episodes = [played(f"t{task}", n, reward=solved[task]) for task in range(15) for n in range(10)]
    with RunFile(await store(tmp_path / "a.db", episodes)) as run_file:
        assert overview_of(run_file).drift == []


async def test_short_episodes_that_end_first_are_not_drift(tmp_path: Path) -> None:
    """Sixty episodes begin at about the same time, alternately long and short. All short ones are stored first."""
    episodes = [played(f"t{n}", turns=6 if n % 2 else 2) for n in range(60)]
    for number, episode in enumerate(episodes):
        episode.seconds = 1e6 - 1e3 * number
    stored = sorted(episodes, key=lambda each: len(each.turns))
    with RunFile(await store(tmp_path / "a.db", stored)) as run_file:
        assert overview_of(run_file).drift == []


async def test_page_against_a_baseline_has_the_comparison(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    target = tmp_path / "page.html"
    arguments = ["report", str(second), "--against", str(first), "--by", "level", "-o", str(target)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = target.read_text()
    for words in ("A is better: the reward of B is lower", "Tasks that flipped", '<a href="#e-t0-0-0">', "hard"):
        assert words in text
    assert CliRunner().invoke(app, ["report", str(second), "--by", "level", "-o", str(target)]).exit_code == 2


@browser_sample
@needs_browser
async def test_page_answers_the_four_questions_of_a_reader(tmp_path: Path) -> None:
    def episode(number: int, *, lost: bool) -> list[Trajectory]:
        failed = played(f"task{number}", outcome=Outcome.ENV_ERROR)
        failed.error = "TimeoutError: the shop is closed (in buy, shop.py:12)"
        solved = [played(f"task{number}", index, reward=0.0 if lost else 1.0, turns=3) for index in range(3)]
        return [failed] if lost and number == 7 else solved

    first = await store(tmp_path / "a.db", [each for number in range(30) for each in episode(number, lost=False)])
    second = await store(
        tmp_path / "b.db", [each for number in range(30) for each in episode(number, lost=number % 3 == 1)]
    )
    with RunFile(second) as run_file:
        write_report(run_file, tmp_path / "page.html", comparison=compare(first, run_file))
    async with browser(tmp_path / "profile") as tab:
        await tab.open(tmp_path / "page.html")
        await tab.until("document.documentElement.dataset.ready")
        comparison = await tab.value("document.querySelector('#comparison').innerText")
        # The page answers: which run is better, and which tasks did B lose?
        assert "A is better" in await tab.value("document.querySelector('header').innerText")
        assert "A is better: the reward of B is lower by 0.3" in comparison
        assert re.search(r"task4\s+lost\s+100%\s+0%", comparison)
        await tab.click("#comparison .pair summary")
        pair = await tab.value("document.querySelector('#comparison .pair[open]').innerText")
        assert re.search(r"A: task\d+-0-0(.|\n)*turn 3(.|\n)*B: task\d+-0-0(.|\n)*turn 3", pair)
        # The page answers: why did an episode fail? Its place is in the first list, and a click leads to the error.
        assert "shop.py:12" in await tab.value("document.querySelector('#look table').innerText")
        await tab.click("#look table a")
        await tab.until("document.querySelector('#e-task7-0-0').open")
        assert "the shop is closed" in await tab.value("document.querySelector('#e-task7-0-0').innerText")
        # The page answers: where were ids bridged? Before turns 2 and 3, and each such id is marked.
        await tab.click("#e-task0-0-1 summary")
        await tab.until("document.querySelector('#e-task0-0-1 .show-tokens')")
        assert (await tab.value("document.querySelector('#e-task0-0-1').innerText")).count("8 ids bridged") == 2
        await tab.click("#e-task0-0-1 .show-tokens")
        await tab.until("document.querySelectorAll('#e-task0-0-1 .tokens i.bridge').length == 16")


async def test_ids_with_half_a_surrogate_are_compared(tmp_path: Path) -> None:
    files = [await store(tmp_path / f"{name}.db", [played("a\ud800"), played("b")]) for name in "ab"]
    done = CliRunner().invoke(app, ["compare", *map(str, files), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["differences"][0]["tasks"] == 2


async def test_json_has_the_whole_comparison(tmp_path: Path) -> None:
    first, second = await two(tmp_path)
    code, text = run(first, second, second, "--json")
    assert code == 0
    made = json.loads(text)
    assert [each["better"] for each in made] == ["A", "A"]
    assert len(made[0]["flipped"]) == 15
    assert made[0]["differences"][0]["decision"] == "lower"
