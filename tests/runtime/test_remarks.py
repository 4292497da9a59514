from __future__ import annotations

import pickle

import pytest

from t3c.runtime.remarks import Code, Coded, Remark
from t3c.serve.refusals import Refusal, Refused


@pytest.mark.parametrize("code", [*Code, *Refused])
def test_every_code_is_rendered_by_the_fields_it_names(code: Coded) -> None:
    value: Remark | Refusal
    if isinstance(code, Refused):
        value = Refusal(code, 3, 4.5, "tiny", 6.5, 7.5)
    else:
        assert isinstance(code, Code)
        value = Remark(
            code, "tiny", "small", "openvino", ("latency",), 3, 4.5, 5.5, 0.1, "ms", ("hot",)
        )
    told = str(value)
    assert told
    assert "{" not in told
    assert code == code.value == code.name.lower()
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_remark_is_a_value_that_reads_as_its_sentence() -> None:
    inner = Remark(Code.NO_FORM, "max", engine="torch", names=("aligned", "factored"))
    remark = Remark(Code.CANNOT_RUN, "max", "large", "torch", causes=(inner,))
    assert str(remark) == "max cannot run on torch: torch has no aligned, factored form"
    assert repr((remark,)) == f"(<cannot_run: {remark}>,)"
    assert remark.code == "cannot_run"
    assert len({remark, Remark(Code.CANNOT_RUN, "max", "large", "torch", causes=(inner,))}) == 1
