"""Where unrolls lie: side by side in one piece of memory, so that one operation writes to many.

An unroll is a block of columns. On the host every array has a piece of its own, [rows, columns,
...]. On a device all that is kept of one environment and step lies together, as one record: then
one indexed write stores the rows of a batch, whatever the number of its arrays and sessions.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 8  # bytes: records are copied as int64
_OUTPUT = 4  # bytes of each number that a policy gives: int32 or float32

DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
}  # of arrays on the wire, by name

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Field:
    """One array of a record.

    Attributes:
        shape: of one row.
        dtype: of the array.
        offset: bytes from the record's beginning.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, records: Tensor) -> Tensor:
        """A view of this array of records [..., bytes] uint8: [..., *shape]."""
        own = records[..., self.offset : self.offset + self.num_bytes].view(self.dtype)
        return own.view(*records.shape[:-1], *self.shape)


class Record:
    """How the arrays of one row lie in memory: first those that the policy gives, then the widest.

    Attributes:
        fields: name -> Field.
        outputs: names of those that a policy gives.
        num_bytes: of one record, a multiple of eight.
    """

    def __init__(self, layout: Layout, outputs: Collection[str] = ()) -> None:
        """Give each array its place.

        Args:
            layout: name -> (shape, dtype) of each.
            outputs: of a policy; of four bytes a number.
        """
        self.fields: dict[str, Field] = {}
        self.outputs = [name for name in layout if name in outputs]
        rest = sorted(layout.keys() - outputs, key=lambda x: (-layout[x][1].itemsize, x))
        offset = 0
        for name in (*self.outputs, *rest):
            shape, dtype = layout[name]
            self.fields[name] = Field(shape, dtype, offset)
            offset += self.fields[name].num_bytes
            if name in outputs:
                assert dtype.itemsize == _OUTPUT
                self._given = offset
        self.num_bytes = -(-offset // _ALIGNED) * _ALIGNED

    def filled(self, records: Tensor, outputs: Mapping[str, Tensor]) -> Tensor:
        """Records [N, bytes] uint8 with what a policy gave for them: [N, words] int64, a copy."""
        parts = [outputs[name].reshape(len(records), -1) for name in self.outputs]
        parts = [part.view(torch.int32) for part in parts]
        rest = records.view(torch.int32)[:, self._given // _OUTPUT :]
        return torch.cat([*parts, rest], 1).view(torch.int64)


class Arena:
    """Memory for unrolls. The storage's lock is held when it changes.

    Column 0 belongs to no unroll: a row that is to be stored nowhere is written to its first row.

    Attributes:
        record: how a row lies in memory, where rows are records; else None.
        arrays: name -> [rows, columns, ...], views of the records where rows are.
        records: [rows * columns, words] int64, all rows; empty where rows are no records.
        columns: there are, column 0 included.
        grown: how often the memory was moved; what was read from `arrays` before is out of date.
    """

    def __init__(
        self,
        layout: Layout,
        firsts: Layout,
        device: torch.device,
        *,
        records: Collection[str] | None,
    ) -> None:
        """Nothing is allocated yet.

        Args:
            layout: name -> (shape, dtype) of each row.
            firsts: the same of what is kept of the first row alone.
            device: where the memory is.
            records: a row is one record; these of it a policy gives. None: it is not.
        """
        self._layout = layout
        self._firsts = firsts
        self._device = device
        self.record = None if records is None else Record(layout, records)
        self.arrays: dict[str, Tensor] = {}
        self.records = torch.empty(0)
        self.columns = 0
        self._rows = 0
        self._taken = 1
        self.grown = 0

    def allocate(self, num_envs: int, rows: int, at_least: int) -> int:
        """Set a block of columns aside; returns the first one.

        Args:
            num_envs: its width.
            rows: its height.
            at_least: columns to make room for if memory is allocated, in all.
        """
        first = self._taken
        self._taken += num_envs
        columns = self.columns
        if self._taken > columns:
            columns = max(self._taken, 2 * columns - 1, at_least + 1)
        self.fit(rows, columns)
        return first

    def fit(self, rows: int, columns: int = 0) -> None:
        """Grow to at least this number of rows and columns."""
        rows, columns = max(rows, self._rows), max(columns, self.columns)
        if (rows, columns) == (self._rows, self.columns):
            return
        before = self.arrays
        self._rows, self.columns = rows, columns
        self.arrays = self._allocate()
        for name, old in before.items():
            self.arrays[name][: old.shape[0], : old.shape[1]] = old
        self.grown += 1

    def _allocate(self) -> dict[str, Tensor]:
        rows, columns, device = self._rows, self.columns, self._device
        firsts = {
            name: torch.zeros((1, columns, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in self._firsts.items()
        }
        if self.record is None:
            arrays = {
                name: torch.zeros((rows, columns, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in self._layout.items()
            }
            return arrays | firsts
        shape = rows, columns, self.record.num_bytes
        data = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.records = data.view(torch.int64).flatten(0, 1)
        fields = self.record.fields
        return {name: fields[name].of(data) for name in self._layout} | firsts
