"Recipes of the pages, as a reader copies them, and the note on batch norm"
from nets import *
from pasted import recipe
from fastai_accum.extras import *

# ---- without statistics of the batch

def test_groups_of_group_norm():
    change = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')
    for channels,groups in (512,32),(64,8),(48,6),(20,2),(13,1):
        assert change(nn.Sequential(nn.BatchNorm2d(channels)))[0].num_groups==groups

# ---- the note on batch norm

def normed(*cbs):
    return make_learner(make_dls(24, 4), limited(layers(nn.BatchNorm1d(5)), 99), cbs=cbs, splitter=params)

@pytest.mark.parametrize('cbs,sees,line', [
    ([MicroBatch(2)], 'MicroBatch(bs=2): batch norm sees 2 samples',
     'leave out MicroBatch, and write\n     learn.gradient_checkpointing()\n'
     '  -> if that does not fit on the GPU, add\n     learn.offload_activations()\n'
     '  -> if not even that fits, write in place of both\n     learn.micro_batch(2, exact=True)\n  -> or do nothing'),
    ([MicroBatch(2, coupled=True)], 'sees 2 samples', 'write in place of both\n     learn.micro_batch(2, exact=True)'),
    ([AccumulateStep(3)], 'AccumulateStep(n_step=3): batch norm sees 4 samples',
     'load batches of 12 in place of AccumulateStep, and write\n     learn.gradient_checkpointing()'),
    ([AccumulateStep(n_samples=8)], 'sees 4 samples', 'load batches of 8 in'),
    ([AccumulateStep(lambda pct: 3)], 'sees 4 samples', 'load the large batch in'),
    ([AccumulateStep(3),MicroBatch(2)], 'sees 2 samples', 'of 12 in place of AccumulateStep and MicroBatch,'),
    ([AccumulateStep(3),MicroBatch(2, exact=True)], 'sees 4 samples',
     'load batches of 12 in place of AccumulateStep\n'),
    ([MicroBatch()], 'sees 2 samples', 'learn.micro_batch(exact=True)')], ids=str)
def test_the_note_comes_once_and_names_the_line(cbs, sees, line, capsys):
    "`MicroBatch()` cuts nothing until memory runs out, which is after the search"
    learn = normed(*cbs)
    learn.lr_find(num_it=2, show_plot=False, suggest_funcs=None)
    if cbs[0].cuts and cbs[0].bs=='auto': learn.model.most = 3
    assert 'batch norm sees' not in capsys.readouterr().out
    for _ in range(2): learn.fit(1)
    said = capsys.readouterr().out
    assert said.count('batch norm sees')==1 and sees in said and line in said, said

def test_the_note_names_no_exact_slices_for_texts_that_are_read_in_pieces(capsys):
    learn = normed(AccumulateStep(3))
    learn.model.bptt = 72
    learn.fit(1)
    said = capsys.readouterr().out
    assert 'learn.gradient_checkpointing()' in said and 'exact=True' not in said, said

@each(cbs=[[], [AccumulateStep(1)], [AccumulateStep(n_samples=4)], [AccumulateStep(n_samples=1)],
           [AccumulateStep(2),BatchNormEval()], [MicroBatch(2, exact=True)], [MicroBatch()], [MicroBatch(4)]])
@pytest.mark.filterwarnings('ignore:.*(1 samples are fewer|no batch of the training)')
def test_no_note(cbs, capsys):
    "Nor where slices are as large as the batch, or would be if memory ran out"
    normed(*cbs).fit(1)
    make_learner(make_dls(24, 4), cbs=AccumulateStep(2)).fit(1)   # without batch norm
    with pytest.raises(ValueError, match='would never step'): normed(AccumulateStep(50, drop_last=True)).fit(1)
    assert 'batch norm' not in capsys.readouterr().out
