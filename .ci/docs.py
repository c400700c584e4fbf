"""`python .ci/docs.py site` builds the site in _docs from the notebooks, `python .ci/docs.py readme` README.md"""
import html,json,os,re,shutil,subprocess,sys,textwrap,yaml
from base64 import b64decode
from functools import partial
from inspect import _empty as empty,formatannotation
from itertools import takewhile
from pathlib import Path
from fastai.callback.core import event
from fastcore.basics import patch_to
from fastcore.docments import DocmentText,MarkdownRenderer
from latex2mathml.converter import convert
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.serve import proc_nbs

cfg = get_config()

@patch_to(MarkdownRenderer)   # the processes that run the notebooks import this file, so it holds in them too
def _repr_markdown_(self):
    "The call as a user writes it, the docstring, and a table of arguments: nbdev puts them all in one block of code"
    if not isinstance(self.dm, DocmentText): return f'```python\n{self.dm}\n```\n\n*{self.docs}*'
    call,rows = [],[['argument','type','meaning'], ['---']*3]
    takes = getattr(self.sym, '__delwrap__', None)   # the function or the class whose arguments it takes
    for k,v in self.dm.dm.items():
        kind,default,anno = (v.get(o, empty) for o in ('kind','default','anno'))
        # nobody passes a function for an event; `**kwargs` only finds what to say about a wrong argument
        if k in vars(event) or getattr(kind, 'name', '').startswith('VAR') and not v.get('docment'): continue
        name = {'VAR_POSITIONAL':'*', 'VAR_KEYWORD':'**'}.get(getattr(kind, 'name', ''), '')+k
        anno = '' if anno is empty else re.sub(r'[a-z_.]+[.](?=[A-Za-z])|(?<=None)Type', '', formatannotation(anno))
        anno = re.sub(r'^(?:Union|Optional)\[(.*)\]$', lambda m: m[1].replace(', ', ' | '), anno)
        if v.get('docment') and getattr(takes, '__module__', '')!=self.sym.__module__:   # or the page has them already
            shown,anno = 'returns' if k=='return' else f'`{name}`',f'`{anno}`'.replace('|', '\\|')*bool(anno)
            rows.append([shown, anno, v['docment']])
        value = '' if default is empty else '='+getattr(default, '__name__', repr(default))
        if k!='return': call.append(name+value)
    docs = (self.docs or '').partition('\n\nArguments:')[0]   # the table has them
    docs = re.sub(rf'\s*{cfg.doc_host}\S+', '', docs)   # the page's own address
    call = textwrap.fill(f'{self.nm.replace("Learner.", "learn.")}({", ".join(call)})', 80, subsequent_indent='    ')
    table = '\n'.join('| '+' | '.join(r).replace('\n', ' ')+' |' for r in rows)*bool(rows[2:])
    return f'```python\n{call}\n```\n\n'+re.sub(r'^(\s*)(.+)', r'\1*\2*', docs, count=1)+f'\n\n{table}'

def rewrite(p, f): p.write_text(f(p.read_text(encoding='utf-8')), encoding='utf-8')

def rendered(*options):
    "The folder of the pages, as smalldocs makes them from the notebooks that nbdev has processed"
    _build_modidx()
    cache,run = Path(proc_nbs(cfg.nbs_path, force=True)),Path(sys.executable).parent/'smalldocs'
    for p in cache.rglob('*.ipynb'): rewrite(p, partial(re.sub, r'output-file: [\w.]+\\n', ''))   # as its name
    subprocess.run([run, 'render', '--quiet', *options, cache], check=True)
    return cache/cfg.doc_path.name

def menus():
    "The notebooks of the reader's menu, and those of the developer's, as paths in `nbs`"
    bars = yaml.safe_load((cfg.nbs_path/'_quarto.yml').read_text(encoding='utf-8'))['website']['sidebar']
    return [[o if isinstance(o, str) else o['href'] for s in bar['contents'] for o in s['contents']] for bar in bars]

def site():
    pages = rendered('--strict')
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(pages, cfg.doc_path)
    for p in cfg.doc_path.rglob('*.html'): rewrite(p, partial(finished, page=p.relative_to(cfg.doc_path)))
    for p in cfg.doc_path.rglob('*.css'): rewrite(p, partial(re.sub, r'@import url\(https:[^)]*\);', ''))
    check_anchors({p.relative_to(cfg.doc_path).as_posix():p for p in cfg.doc_path.rglob('*.html')})
    search_for_readers(cfg.doc_path/'search.json')

def check_anchors(pages):
    "No link to what a page does not have: names of the code lose theirs, and another one is an error"
    ids = {k:{'', *re.findall(r'\bid="([^"]+)"', p.read_text(encoding='utf-8'))} for k,p in pages.items()}
    broken = []
    def checked(page, m):
        to,_,at = html.unescape(m[1]).partition('#')
        to = os.path.normpath(os.path.join(os.path.dirname(page), to)) if to else page
        if to not in ids or at in ids[to]: return m[0]
        if re.fullmatch(r'<code[^>]*>[^<]*</code>', m[2]): return m[2]
        broken.append(f'{page}: {m[1]}')
        return m[0]
    link = r'(?s)<a href="((?!https?:)[^"]*#[^"]+)"[^>]*>(.*?)</a>'
    for k,p in pages.items(): rewrite(p, partial(re.sub, link, partial(checked, k)))
    if broken: sys.exit('links to nowhere:\n'+'\n'.join(broken))

def finished(text, page):
    "Formulas in MathML, plots as large as drawn, cells that name their column, relative links, and the page's notebook"
    def mathml(m): return m[1]+convert(html.unescape(m[3]), display='block' if m[2]=='display' else 'inline')+m[4]
    text = re.sub(r'(<span class="math (inline|display)">)\\[(\[](.*?)\\[)\]](</span>)', mathml, text, flags=re.S)
    text = re.sub(r'<(link|script)\b[^>]*/katex@[^>]*>(</script>)?\s*', '', text)
    text = re.sub(r'src="data:image/png;base64,([^"]{800})[^"]*"', as_drawn, text)
    text = re.sub(r'<table\b.*?</table>', stacked, text, flags=re.S)
    text = re.sub(r'(?s)(?<=<t[dh]).*?(?=</t[dh]>)', lambda m: re.sub(r'<code>([^<]*)</code>', in_a_cell, m[0]), text)
    text = re.sub(r'<p>(?=[^\n]*\btorch \d[^\n]*\bfastai \d)', '<p class="machine">', text)
    text = re.sub(r'<a href="[^"]*"[^>]*>(<code[^>]*>_\w+</code>)</a>', r'\1', text)   # private names
    if page.with_suffix('.ipynb').as_posix() in menus()[0]: text = folded(text)
    text = re.sub(r'<nav id="TOC".*?</nav>', broken_at_dots, text, flags=re.S)
    text = text.replace(f'<a href="{cfg.doc_host}{cfg.doc_baseurl}/', f'<a href="{"../"*(len(page.parts)-1) or "./"}')
    source = (cfg.nbs_path/(nb := page.with_suffix('.ipynb'))).read_text(encoding='utf-8')
    (cfg.doc_path/nb).write_text(source, encoding='utf-8')
    colab = f'{cfg.git_url.replace("github.com", "colab.research.google.com/github")}/blob/{cfg.branch}/nbs/{nb}'
    links = f'<a href="{colab}">Open in Colab</a> · '*('/content' in source)   # it installs the package there
    links += f'<a href="{nb.name}" download>Download the notebook</a>'
    title = r'(?s)(<header id="title-block-header".*?)(?=</header>)'
    return re.sub(title, rf'\1<p class="notebook-links">{links}</p>', text.replace('#LNone', ''), count=1)

def folded(text):
    "Fold what is for developers, the end of a reader's page, and leave it out of `On this page`"
    at,end = text.find('<section id="how-it-works" class="level2">'),text.rfind('</main>')
    if at<0: return text
    head = '<details class="developers"><summary>How it works, for developers</summary>'
    text = text[:at]+head+text[at:end]+'</details>'+text[end:]
    return re.sub(r'(?s)(<nav id="TOC".*?)<li><a href="#how-it-works".*?(</ul></nav>)', r'\1\2', text, count=1)

def broken_at_dots(m):
    "Let a long name in `On this page` break behind its dots"
    return re.sub(r'(?<=>)[^<]*\w\.\w[^<]*(?=</a>)', lambda a: re.sub(r'(?<=\w)\.(?=\w)', '.<wbr>', a[0]), m[0])

def in_a_cell(m, most=36):
    "Code in a cell of a table: a short one keeps on its line, and a long one breaks at spaces, dots and calls only"
    if len(html.unescape(m[1]))<=most: return f'<code class="short">{m[1]}</code>'
    return '<code>'+re.sub(r'(?<=\w)([.(])(?=[a-z])', r'\1<wbr>', m[1])+'</code>'

def as_drawn(m):
    "Note the width of a plot: a point of matplotlib is one of the page, 1/72 of an inch"
    data = b64decode(m[1])
    pixels,per_metre = (int.from_bytes(data[i:i+4]) for i in (16, data.find(b'pHYs')+4))
    return f'{m[0]} style="--drawn:{pixels/per_metre/.0254*96:.0f}px"'

def stacked(m, width=50):
    "Name the column in each cell of a table with more text than fits on a phone: there `styles.css` stacks its cells"
    rows = [re.findall(r'<t[hd]\b.*?</t[hd]>', o, flags=re.S) for o in re.split(r'<tr\b', m[0])[1:]]
    texts = [[html.unescape(re.sub('<[^>]*>', '', o)).strip() for o in r] for r in rows]
    # numbers are compared in a table that scrolls
    if all(len(o)<=7 for t in texts[1:] for o in t[1:4]): return m[0]
    if len({*map(len, rows)})>1 or sum(2+min(30, max(map(len, o))) for o in zip(*texts))<=width: return m[0]
    body = [t for t,r in zip(texts, rows) if '<td' in ''.join(r)]
    names,firsts = texts[0],[t[0] for t in body if t[0]]
    if len(rows)-len(body)==2: names = [a or b for a,b in zip(*texts[:2])]   # the second one names the index
    if all(re.fullmatch(r'[\d.,]+', o) for o in firsts): kind = 'numbers'
    else: kind = 'repeats' if len({*firsts})<len(firsts) else 'true'
    names = iter(names*len(rows))
    cells = re.sub(r'<t[hd]\b', lambda o: f'{o[0]} data-column="{html.escape(next(names))}"', m[0])
    return cells.replace('<table', f'<table data-stacked="{kind}"', 1)

def search_for_readers(p):
    "In the index `p`, leave out what is for developers, also on readers' pages, and add words that readers search for"
    words,pages = yaml.safe_load((Path(__file__).parent/'search.yml').read_text(encoding='utf-8')),{}
    for e in json.loads(p.read_text(encoding='utf-8')): pages.setdefault(e['href'].split('#')[0], []).append(e)
    for o in menus()[1]: pages.pop(o.replace('.ipynb', '.html'), None)
    entries = [e for es in pages.values() for e in takewhile(lambda e: e['section']!='How it works', es)]
    for e in entries: e['section'] = words.get(e['href'], e['section'])
    p.write_text(json.dumps(entries, ensure_ascii=False), encoding='utf-8')

def readme():
    pages,images = rendered(),cfg.nbs_path/'images'
    shutil.rmtree(images, ignore_errors=True)
    shutil.copytree(pages/'index_files', images)
    text = (pages/'index.llms.md').read_text(encoding='utf-8')   # PyPI shows no images by a relative path
    text = text.replace('](index_files/', f']({cfg.git_url}/raw/{cfg.branch}/nbs/images/')
    (cfg.config_path/'README.md').write_text(text, encoding='utf-8')

if __name__=='__main__': dict(site=site, readme=readme)[sys.argv[1]]()
