//! Checks that no error displays its source: `Chain` displays an error with its causes, each once.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Fields, Item, Type};

use super::layers::sources;

/// The folders whose errors are checked.
const PARTS: [&str; 6] = ["src", "common", "ps", "worker", "examples", "benches"];

/// Returns the errors of a source file that display their source.
fn displayed_sources(file: &str, text: &str) -> Vec<String> {
    let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut found = Vec::new();
    add_displayed_sources(&parsed.items, &mut found);
    found.into_iter().map(|name| format!("{file}: {name} displays its source")).collect()
}

fn add_displayed_sources(items: &[Item], found: &mut Vec<String>) {
    for item in items {
        match item {
            Item::Mod(module) => {
                let items = module.content.as_ref().map(|(_, items)| &items[..]);
                add_displayed_sources(items.unwrap_or_default(), found);
            }
            Item::Struct(item) if displays_source(&item.attrs, &item.fields) => {
                found.push(item.ident.to_string());
            }
            Item::Enum(item) => {
                let faulty =
                    item.variants.iter().filter(|one| displays_source(&one.attrs, &one.fields));
                found.extend(faulty.map(|one| format!("{}::{}", item.ident, one.ident)));
            }
            Item::Impl(item) if implements(item, "Display") => {
                let name = self_name(&item.self_ty);
                let has_source = items.iter().any(|other| match other {
                    Item::Impl(other) if implements(other, "Error") => {
                        self_name(&other.self_ty) == name && !other.items.is_empty()
                    }
                    _ => false,
                });
                if has_source && names(&item.to_token_stream(), "source") {
                    found.push(name);
                }
            }
            _ => {}
        }
    }
}

/// Returns whether the `error` attribute of thiserror displays the field that is the source.
fn displays_source(attributes: &[Attribute], fields: &Fields) -> bool {
    let format = attributes.iter().find(|attribute| attribute.path().is_ident("error"));
    let Some(Ok(format)) = format.map(|attribute| attribute.parse_args::<TokenStream>()) else {
        return false;
    };
    let is_source = |(_, field): &(usize, &syn::Field)| {
        let is_marked = field.attrs.iter().any(|attribute| {
            attribute.path().is_ident("source") || attribute.path().is_ident("from")
        });
        is_marked || field.ident.as_ref().is_some_and(|name| name == "source")
    };
    let source = fields.iter().enumerate().find(is_source);
    source.is_some_and(|(number, field)| {
        let name = field.ident.as_ref().map_or_else(|| number.to_string(), ToString::to_string);
        displays(&format, &name)
    })
}

/// Returns whether a format string with its arguments displays the field of this name.
fn displays(format: &TokenStream, name: &str) -> bool {
    let tokens: Vec<TokenTree> = format.clone().into_iter().collect();
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(it) if it.as_char() == ',');
    let mut arguments = tokens.split(is_comma).map(|argument| {
        let text: String = argument.iter().map(ToString::to_string).collect();
        text.rsplit_once('=').map_or(text.clone(), |(_, value)| value.to_owned())
    });
    let string = arguments.next().unwrap_or_default();
    // Only an argument that is the field: one may say something about it.
    is_placeholder_in(&string, name)
        || arguments.any(|argument| argument.trim_start_matches('.') == name)
}

/// Returns whether a text has a placeholder of this name, such as `{name}` or `{name:?}`.
fn is_placeholder_in(text: &str, name: &str) -> bool {
    text.contains(&format!("{{{name}}}")) || text.contains(&format!("{{{name}:"))
}

/// Returns whether a string among the tokens has a placeholder of this name.
fn names(tokens: &TokenStream, name: &str) -> bool {
    tokens.clone().into_iter().any(|token| match token {
        TokenTree::Group(group) => names(&group.stream(), name),
        TokenTree::Literal(literal) => is_placeholder_in(&literal.to_string(), name),
        _ => false,
    })
}

fn implements(item: &syn::ItemImpl, name: &str) -> bool {
    let path = item.trait_.as_ref().and_then(|(path, _)| path.segments.last());
    path.is_some_and(|last| last.ident == name)
}

fn self_name(of: &Type) -> String {
    of.to_token_stream().to_string()
}

#[test]
fn no_error_displays_its_source() {
    let files = PARTS.iter().flat_map(|part| sources(part));
    let files = files.filter(|(file, _)| !file.contains("/target/"));
    let found = files.flat_map(|(file, text)| displayed_sources(&file, &text));
    assert_eq!(found.collect::<Vec<String>>(), [""; 0]);
}

#[test]
fn planted_errors_are_found() {
    let found = |source: &str| displayed_sources("a.rs", source);
    let named = "mod inner { enum A { #[error(\"no: {source}\")] B { source: C }, D } }";
    assert_eq!(found(named), ["a.rs: A::B displays its source"]);
    let marked = "#[error(\"no {0:?}\")] struct A(#[from] B);";
    assert_eq!(found(marked), ["a.rs: A displays its source"]);
    let argument = "#[error(\"no: {}\", .of)] struct A { #[source] of: B }";
    assert_eq!(found(argument), ["a.rs: A displays its source"]);
    let by_hand = "
        impl fmt::Display for A { fn fmt(&self) { write!(f, \"no: {source}\") } }
        impl Error for A { fn source(&self) { self.0 } }
    ";
    assert_eq!(found(by_hand), ["a.rs: A displays its source"]);
    let sound = "
        enum A {
            #[error(transparent)] B(#[from] C),
            #[error(\"no {name}: {}\", source.kind())] D { name: u8, source: E },
            #[error(\"no {0}\")] F(u8, #[source] G),
        }
        impl fmt::Display for H { fn fmt(&self) { write!(f, \"no: {source}\") } }
        impl Error for H {}
    ";
    assert_eq!(found(sound), [""; 0]);
}
