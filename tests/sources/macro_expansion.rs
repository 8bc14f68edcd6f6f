//! Expands `macro_rules!` macros that declare items, for checks that read sources.
//!
//! The expander covers what this workspace declares items with: repetitions, nested groups and the
//! fragments of [`take_fragment`]. It returns an error for everything else.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::discouraged::Speculative;
use syn::parse::{ParseStream, Parser};

/// The rules of one macro: what each matches, and what it expands to.
pub(crate) struct MacroRules {
    rules: Vec<(Vec<Piece>, Vec<Piece>)>,
}

/// A piece of a matcher or of an expansion.
enum Piece {
    /// `$name:fragment` in a matcher, `$name` in an expansion, which has no fragment.
    Variable {
        name: String,
        fragment: String,
    },
    /// `$( pieces ) separator *`
    Repetition {
        pieces: Vec<Piece>,
        separator: Option<TokenTree>,
    },
    Group {
        delimiter: Delimiter,
        pieces: Vec<Piece>,
    },
    Token(TokenTree),
}

/// What a variable matched.
#[derive(Clone)]
enum Matched {
    Once(TokenStream),
    Repeatedly(Vec<Matched>),
}

type Matches = BTreeMap<String, Matched>;

impl MacroRules {
    /// Reads the body of a `macro_rules!` item.
    pub(crate) fn new(body: TokenStream) -> Result<MacroRules, String> {
        let mut tokens = body.into_iter();
        let mut rules = Vec::new();
        while let Some(matcher) = tokens.next() {
            let arrow = tokens.by_ref().take(2).map(|token| token.to_string()).collect::<String>();
            let (TokenTree::Group(matcher), "=>", Some(TokenTree::Group(expansion))) =
                (matcher, arrow.as_str(), tokens.next())
            else {
                return Err("its rules cannot be read".to_owned());
            };
            rules.push((pieces(matcher.stream(), true)?, pieces(expansion.stream(), false)?));
            tokens.next(); // The semicolon.
        }
        Ok(MacroRules { rules })
    }

    /// Returns the items that an invocation declares.
    pub(crate) fn expand(&self, arguments: &TokenStream) -> Result<Vec<syn::Item>, String> {
        for (matcher, expansion) in &self.rules {
            let parser = |input: ParseStream| take(matcher, input);
            if let Ok(matches) = parser.parse2(arguments.clone()) {
                let tokens = expansion_of(expansion, &matches)?;
                let file: syn::File = syn::parse2(tokens).map_err(|error| error.to_string())?;
                return Ok(file.items);
            }
        }
        Err(format!("no rule matches {arguments}"))
    }
}

fn pieces(tokens: TokenStream, is_matcher: bool) -> Result<Vec<Piece>, String> {
    let mut tokens = tokens.into_iter().peekable();
    let mut pieces = Vec::new();
    while let Some(token) = tokens.next() {
        pieces.push(match token {
            TokenTree::Group(group) => Piece::Group {
                delimiter: group.delimiter(),
                pieces: self::pieces(group.stream(), is_matcher)?,
            },
            TokenTree::Punct(dollar) if dollar.as_char() == '$' => match tokens.next() {
                Some(TokenTree::Group(group)) => {
                    let is_operator = |token: &TokenTree| {
                        matches!(token, TokenTree::Punct(punct) if "*+?".contains(punct.as_char()))
                    };
                    let mut separator = tokens.next();
                    if separator.as_ref().is_some_and(is_operator) {
                        separator = None;
                    } else if !tokens.next().as_ref().is_some_and(is_operator) {
                        return Err(format!("the repetition $({group}) cannot be read"));
                    }
                    let pieces = self::pieces(group.stream(), is_matcher)?;
                    Piece::Repetition { pieces, separator }
                }
                Some(TokenTree::Ident(name)) if name == "crate" => {
                    Piece::Token(Ident::new("crate", Span::call_site()).into())
                }
                Some(TokenTree::Ident(name)) => {
                    let fragment = if is_matcher {
                        tokens.by_ref().take(2).skip(1).map(|token| token.to_string()).collect()
                    } else {
                        String::new()
                    };
                    Piece::Variable { name: name.to_string(), fragment }
                }
                _ => return Err("a `$` stands alone".to_owned()),
            },
            token => Piece::Token(token),
        });
    }
    Ok(pieces)
}

fn take(matcher: &[Piece], input: ParseStream) -> syn::Result<Matches> {
    let mut matches = Matches::new();
    for piece in matcher {
        match piece {
            Piece::Variable { name, fragment } => {
                matches.insert(name.clone(), Matched::Once(take_fragment(fragment, input)?));
            }
            Piece::Group { pieces, .. } => {
                let group: Group = input.parse()?;
                let parser = |input: ParseStream| take(pieces, input);
                matches.extend(parser.parse2(group.stream())?);
            }
            Piece::Token(expected) => {
                let found: TokenTree = input.parse()?;
                if found.to_string() != expected.to_string() {
                    return Err(input.error(format!("not {expected}")));
                }
            }
            Piece::Repetition { pieces, separator } => {
                let mut repeated: BTreeMap<String, Vec<Matched>> =
                    variables(pieces).map(|name| (name.to_owned(), Vec::new())).collect();
                let mut is_first = true;
                while !input.is_empty() {
                    let ahead = input.fork();
                    if let (Some(separator), false) = (separator, is_first)
                        && ahead.parse::<TokenTree>()?.to_string() != separator.to_string()
                    {
                        break;
                    }
                    let Ok(once) = take(pieces, &ahead) else { break };
                    input.advance_to(&ahead);
                    for (name, matched) in once {
                        repeated.entry(name).or_default().push(matched);
                    }
                    is_first = false;
                }
                let repeated = repeated.into_iter();
                matches.extend(repeated.map(|(name, all)| (name, Matched::Repeatedly(all))));
            }
        }
    }
    Ok(matches)
}

fn take_fragment(fragment: &str, input: ParseStream) -> syn::Result<TokenStream> {
    Ok(match fragment {
        "ident" => input.parse::<Ident>()?.into_token_stream(),
        "ty" => input.parse::<syn::Type>()?.into_token_stream(),
        "literal" => input.parse::<syn::Lit>()?.into_token_stream(),
        "expr" => input.parse::<syn::Expr>()?.into_token_stream(),
        "meta" => input.parse::<syn::Meta>()?.into_token_stream(),
        "tt" => input.parse::<TokenTree>()?.into_token_stream(),
        _ => return Err(input.error(format!("the fragment {fragment} is unknown"))),
    })
}

/// Yields the variables of these pieces.
fn variables(pieces: &[Piece]) -> Box<dyn Iterator<Item = &str> + '_> {
    Box::new(pieces.iter().flat_map(|piece| match piece {
        Piece::Variable { name, .. } => Box::new(std::iter::once(name.as_str())),
        Piece::Repetition { pieces, .. } | Piece::Group { pieces, .. } => variables(pieces),
        Piece::Token(_) => Box::new(std::iter::empty()),
    }))
}

fn expansion_of(expansion: &[Piece], matches: &Matches) -> Result<TokenStream, String> {
    let mut tokens = TokenStream::new();
    for piece in expansion {
        match piece {
            Piece::Variable { name, .. } => match matches.get(name) {
                Some(Matched::Once(matched)) => tokens.extend(matched.clone()),
                Some(Matched::Repeatedly(_)) => return Err(format!("${name} is repeated")),
                None => return Err(format!("${name} is unknown")),
            },
            Piece::Group { delimiter, pieces } => {
                let group = Group::new(*delimiter, expansion_of(pieces, matches)?);
                tokens.extend([TokenTree::from(group)]);
            }
            Piece::Token(token) => tokens.extend([token.clone()]),
            Piece::Repetition { pieces, separator } => {
                let repeated = variables(pieces).filter_map(|name| match matches.get(name) {
                    Some(Matched::Repeatedly(all)) => Some((name, all)),
                    _ => None,
                });
                let repeated: Vec<(&str, &Vec<Matched>)> = repeated.collect();
                let count = repeated.iter().map(|(_, all)| all.len()).max();
                let count = count.ok_or("a repetition repeats nothing")?;
                for index in 0..count {
                    let mut once = matches.clone();
                    for (name, all) in &repeated {
                        let matched = all.get(index).ok_or_else(|| format!("${name} is short"))?;
                        once.insert((*name).to_owned(), matched.clone());
                    }
                    if index > 0 {
                        tokens.extend(separator.clone());
                    }
                    tokens.extend(expansion_of(pieces, &once)?);
                }
            }
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(rules: &str, arguments: &str) -> Result<String, String> {
        let items = MacroRules::new(rules.parse().unwrap())?.expand(&arguments.parse().unwrap())?;
        Ok(items.iter().map(|item| item.to_token_stream().to_string()).collect())
    }

    #[test]
    fn repetitions_are_nested() {
        let rules = "($($name:ident { $($field:ident: $type:ty),* };)*) => {
            $(pub struct $name { $(pub $field: $crate::Of<$type>,)* })*
        };";
        let expected =
            "pub struct A { pub b: crate::Of<[C]>, pub e: crate::Of<D>, } pub struct F {}";
        let spaceless = |text: String| text.replace(' ', "");
        let found = expanded(rules, "A { b: [C], e: D }; F {};").map(spaceless);
        assert_eq!(found, Ok(spaceless(expected.to_owned())));
    }

    #[test]
    fn what_cannot_be_expanded_is_an_error() {
        let text = |rules, arguments| expanded(rules, arguments).unwrap_err();
        assert!(text("($a:ident) => { struct $a; };", "1").starts_with("no rule matches"));
        assert!(text("($a:pat) => { struct $a; };", "b").starts_with("no rule matches"));
        assert_eq!(text("($($a:ident)*) => { struct $a; };", "b"), "$a is repeated");
    }
}
