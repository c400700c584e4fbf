"""Models with one odd habit each, and common architectures: trained exactly as with the large batch, or refused before
anything has moved.

The models are in tests/kinds.py, some for each row of what broke an earlier version. A control must train; it is a
model that is right, and a refusal of it would be a false alarm. The architectures are in benchmarks/proved.py, and a
few of them here. With `SWEEP=1` in the environment it is all of them in all ways, 24 minutes of one processor."""
import re,sys
from collections import Counter
import pytest
from harness import *
from kinds import Kind,Odd,controls,kinds,later,norm,tol,verdict
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'benchmarks'))

arguments = dict(exact='exact=True', coupled='coupled=True', checkpointing='GradientCheckpointing')
unseen = pytest.mark.xfail(strict=True, reason='a limit, which the page "What is proved, what is refused" names')

def cases_of(ks):
    "Each model in one of its ways, in turn"
    cases,rows = [],Counter()
    for name,k in ks.items():
        cases += [(name, way) for way in (k.ways if SWEEP else [k.ways[rows[k.row]%len(k.ways)]])]
        rows[k.row] += 1
    return [pytest.param(*c, id='-'.join(c), marks=[unseen]*(c[1] in ks[c[0]].limit)) for c in cases]

def words(model):
    "The names by which a message can say where something differs: of modules, parameters, buffers and attributes"
    paths = [n for n,m in model.named_modules() if n]+[n for n,_ in [*model.named_parameters(),*model.named_buffers()]]
    kept = {k for m in model.modules() for k in vars(m) if not k.startswith('_') and k!='training'}
    return {*paths, *kept, *(type(m).__name__ for m in model.modules())}

def says_where(k, way, message):
    "Whether the message names the callback with its argument, and what it is about"
    assert message.startswith(('MicroBatch','GradientCheckpointing')) and arguments[way] in message, message
    found = any(re.search(rf'\b{re.escape(w)}\b', message) for w in words(k.make()[0]))
    found = k.says or found or re.search(r'random numbers|generator|\bpred\b', message)
    assert found, f'names nothing of the model: {message}'
    assert 'use_cache' in message or 'use_cache' not in k.row, message

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name,way', cases_of({**kinds,**controls}))
def test_exact_or_refused(name, way):
    "What is right is not refused"
    k = {**kinds,**controls}[name]
    v,what = verdict(k, way)
    # what a callback switches later is seen later, but before the step with it
    allowed = ['exact']*(not k.says)+['refused']*(name in kinds)+['stopped']*(k.row==later)
    assert v in allowed, f'{v}: {what}'   # an error, and where it is
    assert not k.says or re.search(k.says, what), what
    if v!='exact': says_where(k, way, what)

def test_a_difference_is_seen():
    "Plain slices differ from the large batch where the loss or a norm looks at the batch: the comparison must say so"
    k = Kind(lambda: Odd(lambda m, h: m.bn(h), bn=norm()), 'norm', ())
    v,(err,_) = verdict(k, 'coupled')
    assert v=='silent' and err>1e3*tol

# ---- architectures

proved = pytest.importorskip('proved', reason='needs fastai with vision, text and tabular')

few = [('resnet18','exact'), ('vision_learner(resnet18)','checkpointing'), ('tabular_learner, bn_final','exact'),
       ('AWD-LSTM language model','exact'), ('AWD-LSTM classifier','checkpointing'), ('timm convnext_atto','coupled'),
       ('BERT','coupled'), ('GPT-2, use_cache=True, the whole output','exact')]

@pytest.mark.parametrize('name,way', itertools.product(proved.archs, proved.ways) if SWEEP else few)
def test_architecture(name, way):
    "What is proved is also trained, one step in float64 with batch norm, dropout and all, and compared"
    a = proved.archs[name]
    if needs := a.get('needs'): pytest.importorskip(needs, reason=f'tests a model of {needs}')
    r = proved.row(name, way)
    least = math.inf if r.get('trained') is None else 0.   # one of the two is there
    most = 1e-8 if a.get('in64', True) else 1e-4   # rounding grows by layers, and some run in float32 only
    if way in a['refused']: assert r['what']=='refused' and a['refused'][way][0] in r['says'], r
    else: assert r['what']=='proved' and max(r['trained'] or 0, r.get('error', least))<=most, r
