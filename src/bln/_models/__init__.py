"""Operations on whole torch models.

calibrate   Finds, configures, resets and calibrates the BLN layers.
convert     Replaces other norms by BLN; loads converted models of Hugging Face.
norms       Finds the BLN layer that computes the same as a norm.
check       Shows what convert would do, and its cost.
insert      Adds BLN after each nonlinearity.
adapt       Fits a pretrained BatchNorm net to the data of each request.
freeze      Folds layers for deployment.
neighbours  Finds the modules they can be folded into.
affine      The operation that remains where a layer cannot be folded.
padding     Passes a mask to the layers inside a model.
"""
