"""Build the site or the README from the notebooks.

    python .ci/docs.py site     # _docs, with Quarto if it is installed, otherwise with smalldocs
    python .ci/docs.py readme   # README.md, from nbs/index.ipynb
"""
import base64,html,json,re,shutil,struct,subprocess,sys,yaml
from inspect import Parameter,_empty as empty
from itertools import takewhile
from pathlib import Path
from types import NoneType,UnionType
from typing import Union,get_args,get_origin
from fastai.callback.core import event
from fastcore.basics import patch_to
from fastcore.docments import DocmentText,MarkdownRenderer
from fastcore.nbio import read_nb,write_nb
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.quarto import nbdev_docs,refresh_quarto_yml
from nbdev.serve import proc_nbs

cfg = get_config()
bin = Path(sys.executable).parent

# Signatures on the reference pages. nbdev writes the comment of an argument behind it, in a line that the page cuts;
# here the signature is as a user calls it, and a table has the types and the comments. The processes that run the
# notebooks import this file, so that it holds in them too.

@patch_to(MarkdownRenderer)
def _repr_markdown_(self):
    "Signature, docstring and table of arguments of `self.sym`"
    if not isinstance(self.dm, DocmentText): return f'```python\n{self.dm}\n```\n\n*{self.docs}*'
    dm = {k:v for k,v in self.dm.dm.items() if k not in all_events}
    args,ret = {k:v for k,v in dm.items() if k!='return'},dm.get('return', {})
    commented = any(v.get('docment') for v in dm.values())
    call = signature(self.nm.replace('Learner.', 'learn.'), args, ret, with_types=not commented)
    res = [f'```python\n{call}\n```', re.sub(r'^(\s*)(.+)', r'\1*\2*', self.docs or '', count=1)]
    rows = [cells(k, v) for k,v in args.items() if any(cells(k, v)[1:])]
    if ret.get('docment'): rows.append(cells('return', ret))
    if commented: res.append(table(['argument', 'type', 'meaning'], rows))
    return '\n\n'.join(res)

# fastai's `Callback` takes a function for each event as an argument: nobody passes them
all_events = {o for o in vars(event) if not o.startswith('_')}

def cells(name, arg):
    "The row of an argument, or of what is returned: name, type and comment"
    name = 'returns' if name=='return' else f'`{stars(arg)}{name}`'
    return name,type_name(arg.get('anno', empty)),arg.get('docment') or ''

def stars(arg): return {Parameter.VAR_POSITIONAL:'*', Parameter.VAR_KEYWORD:'**'}.get(arg.get('kind'), '')

def type_name(anno):
    "A type as users import it: `Learner`, not `fastai.learner.Learner`"
    if anno is empty: return ''
    if get_origin(anno) in (Union,UnionType):
        *most,last = [type_name(o) for o in get_args(anno)]
        return f'{", ".join(most)} or {last}'
    return '`None`' if anno is NoneType else f'`{getattr(anno, "__name__", anno)}`'

def signature(name, args, ret, with_types, width=80):
    "The call `name(args)`, on several lines if it does not fit on one"
    plain = lambda v: re.sub(', | or ', '|', type_name(v.get('anno', empty))).replace('`', '')
    parts = []
    for k,v in args.items():
        if v.get('kind')==Parameter.KEYWORD_ONLY and not any(o.startswith('*') for o in parts): parts.append('*')
        part,default = stars(v)+k,v.get('default', empty)
        if with_types and plain(v): part += f':{plain(v)}'
        if default is not empty: part += f'={getattr(default, "__name__", repr(default))}'
        parts.append(part)
    ret = '' if plain(ret) in ('','None') else f' -> {plain(ret)}'
    res = f'{name}({", ".join(parts)}){ret}'
    if len(res)<=width: return res
    lines = ['   ']
    for o in parts:
        if len(lines[-1])+len(o)+2>width: lines.append('   ')
        lines[-1] += f' {o},'
    return '\n'.join([f'{name}(', *lines, f'){ret}'])

def table(head, rows):
    "A Markdown table, without the columns that are empty"
    keep = [i for i in range(len(head)) if any(r[i] for r in rows)]
    row = lambda r: '| '+' | '.join(r[i].replace('|', '\\|').replace('\n', ' ') for i in keep)+' |'
    return '\n'.join([row(head), row(['---']*len(head)), *map(row, rows)])

def smalldocs(*args): subprocess.run([bin/'smalldocs', *args], check=True)

def processed():
    "The notebooks as nbdev processes them for either renderer"
    refresh_quarto_yml(); _build_modidx()
    cache = Path(proc_nbs(cfg.nbs_path, force=True))
    # what only Quarto reads: `format-links` asks for the copies in Markdown that `llms-txt` makes,
    # `html-math-method` for what `formulas` does below, `output-file` repeats the notebook's name
    y,q = cache/'nbdev.yml',cache/'_quarto.yml'
    y.write_text(re.sub(r'\nformat-links:.*', '\n', y.read_text(), flags=re.S))
    q.write_text(re.sub(r'\n *html-math-method:.*', '', q.read_text()))
    for p in cache.rglob('*.ipynb'):
        nb = read_nb(p)
        for c in nb.cells: c.source = re.sub(rf'^output-file: {p.stem}\.html\n', '', c.source, flags=re.M)
        write_nb(nb, p)
    return cache

def menus():
    "The notebooks of the reader's menu, and those of the developer's, as paths in `nbs`"
    bars = yaml.safe_load((cfg.nbs_path/'_quarto.yml').read_text())['website']['sidebar']
    return [[o if isinstance(o, str) else o['href'] for s in bar['contents'] for o in s['contents']] for bar in bars]

def check_menus():
    "Each notebook stands in one menu, and each entry of a menu is a notebook"
    listed,there = sum(menus(), []),[p.relative_to(cfg.nbs_path).as_posix() for p in cfg.nbs_path.rglob('*.ipynb')]
    wrong = {'is not there':set(listed)-set(there), 'is in no menu':set(there)-set(listed),
             'is in the menus twice':{o for o in listed if listed.count(o)>1}}
    wrong = [f'{o} {why}' for why,names in wrong.items() for o in sorted(names)]
    if wrong: sys.exit('\n'.join(['nbs/_quarto.yml, sidebar:', *wrong]))

def site():
    check_menus()
    if shutil.which('quarto'): nbdev_docs.__wrapped__()
    else:
        cache = processed()
        smalldocs('check', cache)
        smalldocs('render', '--strict', '--quiet', cache)
        shutil.rmtree(cfg.doc_path, ignore_errors=True)
        shutil.move(cache/cfg.doc_path.name, cfg.doc_path)
    for p in cfg.doc_path.rglob('*.html'):
        text = stay_on_site(stacked(formulas(p.read_text())), p).replace('#LNone', '')   # nbdev found no line
        p.write_text(with_notebook(as_drawn(text, p), p))
    search_for_readers(cfg.doc_path/'search.json')
    print(f'{len(list(cfg.doc_path.rglob("*.html")))} pages in {cfg.doc_path.name}/')

def formulas(text):
    "Write the formulas that smalldocs leaves in LaTeX as MathML, which browsers show without a script from elsewhere"
    from latex2mathml.converter import convert
    kinds = dict(display='block', inline='inline')
    def mathml(m): return m[1]+convert(html.unescape(m[3]), display=kinds[m[2]])+m[4]
    text = re.sub(r'(<span class="math (inline|display)">)\\[(\[](.*?)\\[)\]](</span>)', mathml, text, flags=re.S)
    return re.sub(r'<(link|script)\b[^>]*/katex@[^>]*>(</script>)?\s*', '', text)

def stacked(text, width=50):
    "Name the column in each cell of a table with more text than fits on a phone: there `styles.css` stacks its cells"
    def plain(cell): return html.unescape(re.sub('<[^>]*>', '', cell)).strip()
    def stack(m):
        rows = [re.findall(r'<t[hd]\b.*?</t[hd]>', o, flags=re.S) for o in re.split(r'<tr\b', m[0])[1:]]
        longest = [max(len(plain(c)) for c in column) for column in zip(*rows)]
        if len({*map(len, rows)})>1 or sum(2+min(30, n) for n in longest)<=width: return m[0]
        names = iter([html.escape(plain(c)) for c in rows[0]]*len(rows))
        cells = re.sub(r'<t[hd]\b', lambda o: f'{o[0]} data-column="{next(names)}"', m[0])
        return cells.replace('<table', '<table data-stacked="true"', 1)
    return re.sub(r'<table\b.*?</table>', stack, text, flags=re.S)

def stay_on_site(text, p):
    "Make the links to pages of this site relative in page `p`: nbdev writes them with the site's address"
    up = '../'*(len(p.relative_to(cfg.doc_path).parts)-1) or './'
    return text.replace(f'<a href="{cfg.doc_host}{cfg.doc_baseurl}/', f'<a href="{up}')

def with_notebook(text, p):
    "Offer the notebook of page `p` below its title: to open it in Colab, and to download it"
    nb = p.relative_to(cfg.doc_path).with_suffix('.ipynb')
    if not (cfg.nbs_path/nb).exists(): return text
    shutil.copy(cfg.nbs_path/nb, p.with_suffix('.ipynb'))
    colab = cfg.git_url.replace('github.com', 'colab.research.google.com/github')
    colab += f'/blob/{cfg.branch}/nbs/{nb.as_posix()}'
    links = f'<a href="{colab}">Open in Colab</a> · <a href="{nb.name}" download>Download the notebook</a>'
    title = r'(<header id="title-block-header".*?)(</header>)'
    return re.sub(title, rf'\1<p class="notebook-links">{links}</p>\2', text, count=1, flags=re.S)

def as_drawn(text, p):
    "Note the width of each plot as it was drawn: a point of matplotlib is one of the page, 1/72 of an inch"
    def sized(m):
        _,is_data,data = m[2].partition('data:image/png;base64,')
        data = base64.b64decode(data[:1000]) if is_data else (p.parent/m[2]).read_bytes()
        at = data.find(b'pHYs')   # pixels per metre
        if at<0: return m[0]
        pixels,per_metre = struct.unpack('>I', data[16:20])[0],struct.unpack('>I', data[at+4:at+8])[0]
        return f'{m[1]}{m[2]}" style="--drawn:{pixels/per_metre/.0254*96:.0f}px"'
    return re.sub(r'(<img\b[^>]*\bsrc=")(data:image/png;base64,[^"]*|[^":]*\.png)"', sized, text)

# What readers search for, and the page or section that says it in other words
searched = {
    'howto/memory.html': 'out of memory, OOM',
    'tutorials/proof.html': 'proof',
    'tutorials/several_gpus.html': 'several GPUs, multiple GPUs, DDP',
    'tutorials/lr_find.html': 'learning rate, lr_find',
    'tutorials/text_classifier.html': 'texts, NLP',
    'extras/skip.html': 'loss is NaN',
    'works_with.html#precision': 'mixed precision, fp16, bf16',
    'works_with.html#how-a-fit-is-started': 'resume',
    'howto/callbacks.html': 'my own callback',
    'questions.html#why-do-i-get-another-result-with-8-4-than-with-32': 'different result, wrong result',
    'questions.html#do-i-have-to-step-at-the-end-of-the-epoch': 'last batch, drop_last',
    'questions.html#what-does-it-cost': 'slow, speed',
}

def search_for_readers(p):
    "In the search index `p`, leave out what only developers need, and add the words that readers search for"
    hidden,pages = {Path(o).with_suffix('.html').as_posix() for o in menus()[1]},{}
    for e in json.loads(p.read_text()): pages.setdefault(e['href'].split('#')[0], []).append(e)
    # on a reader's page, all from "How it works" on is for developers
    entries = [e for page,es in pages.items() if page not in hidden
               for e in takewhile(lambda e: e['section']!='How it works', es)]
    for e in entries: e['section'] = ' · '.join(filter(None, [e['section'], searched.get(e['href'])]))
    p.write_text(json.dumps(entries, ensure_ascii=False))

def readme():
    cache = processed()
    smalldocs('render', '--quiet', cache)
    site,images = cache/cfg.doc_path.name,cfg.nbs_path/'images'
    shutil.rmtree(images, ignore_errors=True)
    shutil.copytree(site/'index_files', images)
    at = f'{cfg.git_url}/raw/{cfg.branch}/nbs/images/'   # PyPI shows no images by a relative path
    text = (site/'index.llms.md').read_text().replace('](index_files/', f']({at}')
    (cfg.config_path/'README.md').write_text(text)

if __name__=='__main__': dict(site=site, readme=readme)[sys.argv[1]]()
