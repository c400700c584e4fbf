"""Common architectures are proved before the first step, or refused for a reason that we know: benchmarks/proved.py

What is proved is also trained, one step in float64 with batch norm, dropout and all, and compared with the large
batch."""
import sys
from pathlib import Path
import pytest
sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'benchmarks'))
proved = pytest.importorskip('proved', reason='needs fastai with vision, text and tabular')

tol = 1e-8   # of deep networks with batch norm over few samples, whose rounding grows from layer to layer

@pytest.mark.parametrize('way', proved.ways)
@pytest.mark.parametrize('name', proved.archs)
def test_architecture(name, way):
    a = proved.archs[name]
    if needs := a.get('needs'): pytest.importorskip(needs, reason=f'tests a model of {needs}')
    r = proved.row(name, way)
    if way in a['refused']: assert r['what']=='refused' and a['refused'][way][0] in r['says'], r
    elif not a.get('in64', True): assert r['what']=='not tried' and 'Double' in r['says'], r
    else:
        assert r['what']=='proved', r
        assert (r['trained'] or 0)<=tol and r.get('error', 0)<=tol, r
