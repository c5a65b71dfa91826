"""The trainer without a pipeline."""

import runs

import tfgpipe
from tools.results.image import PlainTrainer
from tools.train.trainer import Trainer


def test_plain_trainer_makes_a_model_without_a_pipeline():
    trainer = PlainTrainer(runs.IMAGE, 1)
    assert not isinstance(trainer.model, tfgpipe.GPipe)
    assert trainer.model.count_params() == (
        Trainer(runs.IMAGE, 1).model.count_params()
    )
