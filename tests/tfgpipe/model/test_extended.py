"""A method of a subclass that leaves out the pipeline is an error."""

import keras
import pytest
import tensorflow as tf
from tiny import assert_same, compiled, data, pipeline, weights

import tfgpipe


class Textbook(tfgpipe.GPipe):
    """The steps of Keras's guides."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss": self.compute_loss(y=y, y_pred=self(x))}

    def predict_step(self, data):
        return self(keras.utils.unpack_x_y_sample_weight(data)[0])


class OwnFunction(tfgpipe.GPipe):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": 0.0}


class TextbookMixin:
    predict_step = Textbook.__dict__["predict_step"].__wrapped__


class Mixed(TextbookMixin, tfgpipe.GPipe):
    pass


class Calling(Textbook):
    """Calls what does not call the pipeline."""

    def train_step(self, data):
        return super().train_step(data)


USES = {
    "fit": lambda model: model.fit(*data(), verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(*data()),
    "evaluate": lambda model: model.evaluate(*data(), verbose=0),
    "predict": lambda model: model.predict(data()[0], verbose=0),
}
WRONG = [
    (Textbook, "fit", "train_step"),
    (Textbook, "evaluate", "test_step"),
    (Textbook, "predict", "predict_step"),
    (Calling, "train_on_batch", "train_step"),
    (OwnFunction, "fit", "make_train_function"),
    (Mixed, "predict", "predict_step"),
]


@pytest.mark.parametrize(("cls", "use", "method"), WRONG)
def test_method_that_leaves_out_the_pipeline_is_refused(cls, use, method):
    model = compiled(pipeline(cls=cls))
    before = weights(model)
    with pytest.raises(TypeError, match=f"Call `super...{method}") as error:
        USES[use](model)
    assert f"`{method}` of a subclass" in str(error.value)
    assert_same(weights(model), before)


def test_functional_subclass_is_told_what_a_step_must_call():
    class Functional(keras.Model):
        train_step = Textbook.train_step

    x = keras.Input((4,))
    with pytest.raises(ValueError, match=r"in a subclass of `tfgpipe\.GPipe`"):
        tfgpipe.GPipe(Functional(x, keras.layers.Dense(2)(x)))
