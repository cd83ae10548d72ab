// Syntax colours of code blocks: comments, strings, numbers, keywords and calls of common languages.
const WORDS = new Set(
  `abstract and as assert async await begin break case catch class const constexpr continue def default defer del do done
  echo elif else end enum esac except export extends extern false fi final finally fn for foreach from fun func function go
  if impl implements import in include instanceof interface is lambda let local loop match mod module mut namespace new nil
  none not null nullptr of or override package pass print private protected pub public raise range return select self sizeof
  static struct super switch template then this throw throws trait true try type typedef typeof undefined union unless use
  using val var virtual void where while with yield
  alter create delete drop group having insert into join limit on order set table update values`.split(/\s+/),
);
const COMMENTS = [
  [/^(py|python|sh|bash|zsh|shell|console|rb|ruby|ya?ml|toml|r|perl|make|makefile|dockerfile|elixir|julia)$/, "#.*"],
  [/^(sql|lua|haskell|hs)$/, "--.*"],
  [/^(html|xml|svg|markdown|md)$/, "<!--[^]*?(?:-->|$)"],
  [/^(text|txt|plain|json)?$/, "(?!)"], // none
  [/./, "\\/\\/.*|\\/\\*[^]*?(?:\\*\\/|$)"],
];
const STRINGS = "\"\"\"[^]*?(?:\"\"\"|$)|\"(?:[^\"\\\\\\n]|\\\\.)*\"|'(?:[^'\\\\\\n]|\\\\.)*'|`(?:[^`\\\\]|\\\\.)*`";

/** Pieces of code in order: [kind, text]; kind "" has no colour. */
export function pieces(code, language = "") {
  const lang = language.trim().toLowerCase().split(/[\s:{]/)[0];
  const comments = COMMENTS.find(([names]) => names.test(lang))?.[1] ?? "(?!)";
  const pattern = new RegExp(`(${comments})|(${STRINGS})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)(\\s*\\()?`, "g");
  const found = [];
  const add = (kind, text) => text && (found.at(-1)?.[0] === kind ? (found.at(-1)[1] += text) : found.push([kind, text]));
  let at = 0;
  for (const match of code.matchAll(pattern)) {
    const [whole, comment, string, number, word, call] = match;
    add("", code.slice(at, match.index));
    if (comment) add("comment", comment);
    else if (string) add("string", string);
    else if (number) add("number", number);
    else {
      add(WORDS.has(/^sql$/.test(lang) ? word.toLowerCase() : word) || /^(True|False|None)$/.test(word) ? "word" : call ? "call" : "", word);
      add("", call ?? "");
    }
    at = match.index + whole.length;
  }
  add("", code.slice(at));
  return found;
}
