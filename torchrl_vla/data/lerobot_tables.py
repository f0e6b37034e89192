"""Tables of a LeRobot data set in Arrow's types: rows of frames, and the instructions."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from PIL import Image

from torchrl_vla.data.lerobot_layout import DEFAULT_COLUMNS, Feature

NUMBERS = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
"""Dtypes of features that are no camera."""


def check_features(features: Mapping[str, Feature]) -> None:
    """Check that the format can hold the features; raises ValueError."""
    for key, feature in features.items():
        wanted = 3 if feature.is_camera else 1
        if "/" in key or key in DEFAULT_COLUMNS or len(feature.shape) != wanted:
            raise ValueError(
                f"feature {key!r} of shape {feature.shape}: names hold no '/', are none of "
                f"{list(DEFAULT_COLUMNS)}, and shapes are (D,), or (h, w, 3) for cameras"
            )
        if not feature.is_camera and feature.dtype not in NUMBERS:
            raise ValueError(f"feature {key!r} has dtype {feature.dtype}, writable are {NUMBERS}")


def check_episode(features: Mapping[str, Feature], given: Mapping[str, np.ndarray]) -> int:
    """Check an episode against the features; return its number of frames."""
    if set(given) != set(features):
        raise ValueError(
            f"an episode needs exactly the features {sorted(features)}; missing "
            f"{sorted(set(features) - set(given))}, unknown {sorted(set(given) - set(features))}"
        )
    length = len(next(iter(given.values())))
    for key, values in given.items():
        feature = features[key]
        shape, dtype = (() if feature.shape == (1,) else feature.shape), feature.dtype
        if feature.is_camera:
            shape, dtype = (3, *feature.shape[:2]), "uint8"
        if values.dtype != dtype or values.shape != (length, *shape) or not length:
            raise ValueError(
                f"{key!r} is {values.dtype} {values.shape}, must be {dtype} "
                f"{(length or 'at least 1', *shape)} like its feature"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(
                f"{key!r} has {(~np.isfinite(values)).sum()} values that are not finite"
            )
    return length


def row_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Arrow schema of the rows; says which columns are pictures, for Hugging Face's reader."""
    fields, pictures = [], {}
    for key, feature in features.items():
        if feature.dtype == "image":
            fields.append(pa.field(key, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
            pictures[key] = {"_type": "Image"}
        elif feature.dtype != "video":
            number = pa.from_numpy_dtype(np.dtype(feature.dtype))
            single = feature.shape == (1,)
            fields.append(pa.field(key, number if single else pa.list_(number, feature.shape[0])))
    fields += [pa.field(key, getattr(pa, dtype)()) for key, dtype in DEFAULT_COLUMNS.items()]
    hint = {"huggingface": json.dumps({"info": {"features": pictures}})} if pictures else None
    return pa.schema(fields, metadata=hint)


def row_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Bring one episode's values of a feature into the type of its column."""
    if pa.types.is_struct(kind):
        coded = [
            {"bytes": _png(image), "path": f"frame-{number:06d}.png"}
            for number, image in enumerate(values)
        ]
        return pa.array(coded, type=kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), kind.list_size)
    return pa.array(values, type=kind)


def _png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(out, format="PNG")
    return out.getvalue()


def task_table(tasks: Mapping[str, int]) -> pa.Table:
    """Instructions as the index of a pandas frame: without this hint LeRobot shows numbers."""
    columns = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    hint = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": n, "field_name": n, "pandas_type": p, "numpy_type": t, "metadata": None}
            for n, p, t in columns
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(hint)})
