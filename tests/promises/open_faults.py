"""Tags of cases that are known to fail: a mend takes its own out."""

OPEN = {
    "data unknown": "what needs no data runs when data of unknown length end",
    "labels ternary": "hinge losses look at all labels of a batch",
    "layer again of dropout": "seeds shared by cells are not in files",
    "layer branch": "no random numbers in a branch of a condition",
    "layer closure": "weights that are read are not tied",
    "layer count_reader": "state of another cell is the old one",
    "layer fixed": "`training` leaks out of a layer",
    "layer noise_of_shared_seeds": "seeds shared by cells are not in files",
    "layer rematerialized": "weights in `keras.remat` are not trained",
    "layer tied_inner": "a weight that another layer assigns is the old one",
    "layer to_complex": "complex tensors carry no gradient between cells",
    "layers in a frozen layer": "`trainable` of a layer that holds others",
    "metric function dice": "a function of a batch is taken for one of rows",
    "metric function tversky": "a function of a batch is taken for one of rows",
    **{
        f"metric loss {name}": "a loss object is taken for a function of rows"
        for name in ("Dice", "Hinge", "MeanSquaredError")
    },
}
