"""Results of scipy for `test_comparison.py`: `python scipy_reference.py > scipy_reference.json`.

The script needs scipy, which deltarunner does not need.
"""

import json
import random

from scipy import __version__, stats  # type: ignore[import-untyped]  # scipy has no types

draw = random.Random(5)
cases = []
for count in (2, 3, 8, 40, 400):
    pairs = [(draw.random(), draw.random() + draw.choice((0, 0.1, 0.4))) for _ in range(count)]
    test = stats.ttest_rel([second for _, second in pairs], [first for first, _ in pairs])
    low, high = test.confidence_interval(0.95)
    cases.append({"pairs": pairs, "p_value": test.pvalue, "low": low, "high": high})
points = [(t, degrees) for t in (0.0, 0.3, 1.0, 2.5, 7.0, 40.0) for degrees in (1, 2, 5, 30, 1000, 100_000)]
print(
    json.dumps(
        {
            "scipy": __version__,
            "paired": cases,
            "p_values": [(t, degrees, 2 * stats.t.sf(t, degrees)) for t, degrees in points],
            "quantiles": [(degrees, stats.t.ppf(0.975, degrees)) for degrees in (1, 2, 3, 10, 63, 999, 100_000)],
        }
    )
)
