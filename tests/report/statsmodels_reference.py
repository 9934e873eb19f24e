"""Results of statsmodels for `test_comparison.py`: `... statsmodels_reference.py > ....json`.

The script needs statsmodels, which deltarunner does not need. Errors come from linear regressions, clustered by task.
"""

import json
import random

import numpy as np
import statsmodels  # type: ignore[import-not-found]  # installed in a separate environment
import statsmodels.api as sm  # type: ignore[import-not-found]  # as above

draw = random.Random(7)


def sample(tasks: int, shift: float = 0.0) -> list[tuple[str, float]]:
    """Draw unequal numbers of episodes for tasks of different difficulty."""
    made = []
    for task in range(tasks):
        hard = draw.random()
        made += [(f"t{task}", round(hard + shift + draw.gauss(0, 0.3), 6)) for _ in range(draw.randrange(1, 7))]
    return made


def clustered(values: list[float], regressors: list[list[float]], tasks: list[str]) -> sm.regression.linear_model:
    groups = np.unique(tasks, return_inverse=True)[1]
    return sm.OLS(values, regressors).fit(cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)


means, differences = [], []
for count in (2, 5, 40, 300):
    values = sample(count)
    fit = clustered([value for _, value in values], [[1.0]] * len(values), [task for task, _ in values])
    low, high = fit.conf_int()[0]
    means.append({"values": values, "mean": fit.params[0], "error": fit.bse[0], "low": low, "high": high})
for first_count, second_count in ((3, 3), (10, 6), (40, 40)):
    first, second = sample(first_count), sample(second_count, 0.3)
    both = [*first, *second]
    regressors = [[1.0, float(number >= len(first))] for number in range(len(both))]
    fit = clustered([value for _, value in both], regressors, [task for task, _ in both])
    differences.append({"first": first, "second": second, "difference": fit.params[1], "error": fit.bse[1]})
print(json.dumps({"statsmodels": statsmodels.__version__, "means": means, "differences": differences}))
