"""What `save_pretrained` writes while a model is in training."""

import re
from pathlib import Path

from hf_efficient.compression.recovery.serving import serving


_CHECKPOINT = re.compile(r"checkpoint-\d+")  # the folders that Trainer resumes from


def save_pretrained(self, save_directory, *args, state_dict=None, **kwargs):
    """Takes the place of the model's method while its layers are trained.

    Writes the packed model, as it would be if training ended now. A folder named as Trainer names its checkpoints gets
    the weights as they are learned, to go on from, and no config.json: it is no model, and `from_pretrained` says that
    the file is missing. Weights keep the names that they have in the model: Trainer resumes from no others. Unpickling
    looks the method up by this name, and finds the class's own.
    """
    if _CHECKPOINT.fullmatch(Path(save_directory).name):
        kwargs |= {"state_dict": state_dict, "save_original_format": False}
        type(self).save_pretrained(self, save_directory, *args, **kwargs)
        (Path(save_directory) / "config.json").unlink(missing_ok=True)
        return
    state, config, _ = self._before_training
    own = {key: self.__dict__.pop(key) for key in ("save_pretrained", "config")}
    self.__dict__.update(state, config=config)
    try:
        with serving(self) as served:
            served.save_pretrained(save_directory, *args, **kwargs)
    finally:
        for key in state:
            self.__dict__.pop(key, None)
        self.__dict__.update(own)
