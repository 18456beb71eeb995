"""The studies of benchmarks/accuracy compare at equal samples."""

from accuracy.studies import STUDIES


def test_candidates_learn_from_equally_many_samples_in_whole_rounds():
    for study in STUDIES.values():
        for name, candidate in study.candidates.items():
            for task in study.rates:
                plan = study.plan(task, name, 0, 1.0)
                assert plan.samples == study.samples
                assert plan.steps % candidate.round_steps == 0
