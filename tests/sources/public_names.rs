//! Keeps every public name of the facade, so that a change of one is seen in its commit.
//!
//! `public_names.txt` has one name a line: of each module, item, method, field and variant that a
//! program can reach with all features on. An item that several paths reach has its members under
//! the shortest; `A = B` says that the path `A` is another way to `B`. After a change on purpose,
//! `PUSHPULL_BLESS=1 cargo test --test sources public_names` writes the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::{Attribute, Fields, ImplItem, Item, Path as ItemPath, TraitItem, Type};

use super::crates::{Crates, Definition, ModuleId, is_built, is_hidden, is_public};

/// The most names at the root of the facade: a first program finds its names there, the rest is in
/// modules.
const ROOT_NAMES_MAX: usize = 39;

/// The list of all names, from the root of the workspace.
const LIST: &str = "tests/sources/public_names.txt";

/// An item by the module that declares it and its index there.
type ItemId = (ModuleId, usize);

/// Returns the lines of the list for a crate.
fn public_names(crates: &Crates, name: &str) -> BTreeSet<String> {
    let mut reached = Reached::default();
    reached.add_module(crates, crates.root(name), name, &mut Vec::new());
    let impls = inherent_impls(crates);
    let mut lines = reached.lines;
    for ((module, index), paths) in reached.items {
        let mut paths: Vec<(String, bool)> = paths.into_iter().collect();
        paths.sort_by_key(|(path, _)| path.matches("::").count());
        let (shortest, is_hidden) = &paths[0];
        let item = &crates.items(module)[index];
        lines.insert(line(shortest, kind(item), *is_hidden));
        for (path, _) in &paths[1..] {
            lines.insert(format!("{path} = {shortest}"));
        }
        let members = members(item).into_iter();
        let of_impls = impls.get(&(module, index)).into_iter().flatten().copied();
        for (member, kind, is_hidden) in members.chain(of_impls.flat_map(impl_members)) {
            lines.insert(line(&format!("{shortest}::{member}"), kind, is_hidden));
        }
    }
    lines
}

/// What the walk over public modules has reached.
#[derive(Default)]
struct Reached {
    /// Lines of modules and of items of other crates.
    lines: BTreeSet<String>,
    /// For each item its paths, and whether documentation hides them.
    items: BTreeMap<ItemId, BTreeSet<(String, bool)>>,
}

impl Reached {
    fn add_module(
        &mut self,
        crates: &Crates,
        module: ModuleId,
        path: &str,
        above: &mut Vec<ModuleId>,
    ) {
        assert!(!above.contains(&module), "{path} contains itself");
        above.push(module);
        for name in crates.names(module).iter().filter(|name| name.is_public) {
            let path = format!("{path}::{}", name.text);
            for definition in crates.definitions(module, name) {
                match definition {
                    Definition::Module(below) => {
                        self.lines.insert(line(&path, "mod", name.is_hidden));
                        self.add_module(crates, below, &path, above);
                    }
                    Definition::Item(of, index) => {
                        let paths = self.items.entry((of, index)).or_default();
                        paths.insert((path.clone(), name.is_hidden));
                    }
                    Definition::Foreign(of) => _ = self.lines.insert(format!("{path} = {of}")),
                }
            }
        }
        above.pop();
    }
}

fn line(path: &str, kind: &str, is_hidden: bool) -> String {
    format!("{path} ({kind}{})", if is_hidden { ", hidden" } else { "" })
}

fn kind(item: &Item) -> &'static str {
    match item {
        Item::Const(_) => "const",
        Item::Enum(_) => "enum",
        Item::Fn(_) => "fn",
        Item::Static(_) => "static",
        Item::Struct(_) => "struct",
        Item::Trait(_) => "trait",
        Item::Type(_) => "type",
        _ => panic!("a public item has an unknown kind"),
    }
}

/// Returns the inherent `impl` blocks of each item.
fn inherent_impls(crates: &Crates) -> BTreeMap<ItemId, Vec<&syn::ItemImpl>> {
    let mut impls: BTreeMap<ItemId, Vec<&syn::ItemImpl>> = BTreeMap::new();
    for module in crates.all() {
        for item in crates.items(module) {
            let Item::Impl(item) = item else { continue };
            if item.trait_.is_some() || impl_members(item).is_empty() {
                continue;
            }
            let Type::Path(of) = &*item.self_ty else {
                panic!("an impl in {} is of no path", crates.path(module));
            };
            let path = segments(&of.path);
            let found = crates.resolve(module, &path).into_iter().find_map(|found| match found {
                Definition::Item(of, index) => Some((of, index)),
                _ => None,
            });
            let text = path.join("::");
            let found = found
                .unwrap_or_else(|| panic!("cannot resolve impl {text} in {}", crates.path(module)));
            impls.entry(found).or_default().push(item);
        }
    }
    impls
}

fn segments(path: &ItemPath) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// Returns the public members of an `impl` block: name, kind, whether they are hidden.
fn impl_members(item: &syn::ItemImpl) -> Vec<(String, &'static str, bool)> {
    let of_item = |item: &ImplItem| {
        let (attributes, visibility, name, kind) = match item {
            ImplItem::Const(item) => (&item.attrs, &item.vis, &item.ident, "const"),
            ImplItem::Fn(item) => (&item.attrs, &item.vis, &item.sig.ident, "fn"),
            ImplItem::Type(item) => (&item.attrs, &item.vis, &item.ident, "type"),
            _ => panic!("an impl has an item of an unknown kind"),
        };
        (is_public(visibility) && is_built(attributes))
            .then(|| (name.to_string(), kind, is_hidden(attributes)))
    };
    item.items.iter().filter_map(of_item).collect()
}

/// Returns the public members of an item without those of `impl` blocks.
fn members(item: &Item) -> Vec<(String, &'static str, bool)> {
    match item {
        Item::Struct(item) => fields(&item.fields, false),
        Item::Enum(item) => {
            let variants = item.variants.iter().filter(|variant| is_built(&variant.attrs));
            let members = variants.flat_map(|variant| {
                let name = variant.ident.to_string();
                let fields = fields(&variant.fields, true).into_iter();
                let fields: Vec<_> = fields
                    .map(|(field, kind, is_hidden)| (format!("{name}::{field}"), kind, is_hidden))
                    .collect();
                [(name, "variant", is_hidden(&variant.attrs))].into_iter().chain(fields)
            });
            members.collect()
        }
        Item::Trait(item) => {
            let of_item = |item: &TraitItem| {
                let (attributes, name, kind): (&[Attribute], _, _) = match item {
                    TraitItem::Const(item) => (&item.attrs, &item.ident, "const"),
                    TraitItem::Fn(item) => (&item.attrs, &item.sig.ident, "fn"),
                    TraitItem::Type(item) => (&item.attrs, &item.ident, "type"),
                    _ => panic!("a trait has an item of an unknown kind"),
                };
                is_built(attributes).then(|| (name.to_string(), kind, is_hidden(attributes)))
            };
            item.items.iter().filter_map(of_item).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the public fields; those of variants are as public as their enum.
fn fields(fields: &Fields, are_public: bool) -> Vec<(String, &'static str, bool)> {
    let numbered = fields.iter().enumerate();
    let built = numbered.filter(|(_, field)| is_built(&field.attrs));
    let public = built.filter(|(_, field)| are_public || is_public(&field.vis));
    let named = public.map(|(number, field)| {
        let name = field.ident.as_ref().map_or_else(|| number.to_string(), ToString::to_string);
        (name, "field", is_hidden(&field.attrs))
    });
    named.collect()
}

#[test]
fn the_public_names_of_the_facade_are_listed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(LIST);
    let names = public_names(&Crates::read(), "pushpull");
    if std::env::var_os("PUSHPULL_BLESS").is_some() {
        let text: String = names.iter().flat_map(|name| [name, "\n"]).collect();
        fs::write(&path, text).unwrap();
    }
    let listed = fs::read_to_string(&path).unwrap_or_default();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let new = names.difference(&listed).map(|name| format!("+ {name}\n"));
    let gone = listed.difference(&names).map(|name| format!("- {name}\n"));
    let changes: String = new.chain(gone).collect();
    assert!(
        changes.is_empty(),
        "the public names differ from {LIST}:\n{changes}if that is meant: \
         PUSHPULL_BLESS=1 cargo test --test sources public_names"
    );
}

#[test]
fn the_root_of_the_facade_has_few_names() {
    let names = public_names(&Crates::read(), "pushpull").into_iter();
    let paths = names.filter_map(|name| Some(name.split_once(' ')?.0.to_owned()));
    let at_root = paths.filter(|path| path.matches("::").count() == 1);
    let at_root: BTreeSet<String> = at_root.collect();
    assert!(at_root.len() <= ROOT_NAMES_MAX, "{} names: {at_root:?}", at_root.len());
    let expected = ["pushpull::Worker", "pushpull::PsConfig", "pushpull::optim", "pushpull::error"];
    assert!(expected.iter().all(|name| at_root.contains(*name)), "{at_root:?}");
}

#[test]
fn the_facade_re_exports_lists_of_names() {
    let crates = Crates::read();
    let of_facade = |module: &ModuleId| crates.path(*module).split("::").next() == Some("pushpull");
    let globs = |module| crates.public_globs(module);
    assert_eq!(crates.all().filter(of_facade).flat_map(globs).collect::<Vec<String>>(), [""; 0]);
}

#[test]
fn a_glob_of_public_names_is_found() {
    let mut crates = Crates::default();
    let source = "pub use b::*; use c::*; pub use d::{e::*, f};";
    crates.add("a", syn::parse_file(source).unwrap().items, Path::new("nowhere"));
    assert_eq!(crates.public_globs(crates.root("a")), ["a: b::*", "a: d::e::*"]);
}

/// Returns the list for a crate `a` of these two sources, of which `b` is a crate beside it.
fn listed(a: &str, b: &str) -> Vec<String> {
    let mut crates = Crates::default();
    for (name, source) in [("a", a), ("b", b)] {
        crates.add(name, syn::parse_file(source).unwrap().items, Path::new("nowhere"));
    }
    public_names(&crates, "a").into_iter().collect()
}

#[test]
fn names_of_every_form_are_listed() {
    let facade = "
        pub use b::{Point, area, inner, shape as form};
        pub use b::shape;
        pub mod more { pub use b::Point; pub fn make() {} const _PRIVATE: u8 = 0; }
        #[cfg(feature = \"some\")]
        pub const LIMIT: u8 = 1;
        #[cfg(doctest)]
        pub struct Page;
        use b::Unlisted;
    ";
    let member = "
        mod point {
            pub struct Point { pub x: u8, y: u8 }
            impl Point { pub fn of(x: u8) -> Point { f() } fn private() {} }
            impl Clone for Point { fn clone(&self) -> Point { f() } }
        }
        pub use point::*;
        pub use shape::shape;
        pub mod shape { pub fn shape() {} pub struct Pair(pub u8, u8); }
        mod area { pub fn area() {} }
        pub use area::area;
        pub mod inner {
            macro_rules! kinds { ($($name:ident),*) => { pub enum Kind { $($name { size: u8 }),* } }; }
            kinds!(Small, Large);
            #[doc(hidden)]
            pub trait Sized { const SIZE: u8; fn size(&self) -> u8; }
            impl super::Point { #[cfg(test)] pub fn tested() {} pub(crate) fn narrow() {} pub fn far() {} }
        }
        pub struct Unlisted;
    ";
    assert_eq!(
        listed(facade, member),
        [
            "a::LIMIT (const)",
            "a::Point (struct)",
            "a::Point::far (fn)",
            "a::Point::of (fn)",
            "a::Point::x (field)",
            "a::area (fn)",
            "a::form (fn)",
            "a::form (mod)",
            "a::form::Pair (struct)",
            "a::form::Pair::0 (field)",
            "a::form::shape = a::form",
            "a::inner (mod)",
            "a::inner::Kind (enum)",
            "a::inner::Kind::Large (variant)",
            "a::inner::Kind::Large::size (field)",
            "a::inner::Kind::Small (variant)",
            "a::inner::Kind::Small::size (field)",
            "a::inner::Sized (trait, hidden)",
            "a::inner::Sized::SIZE (const)",
            "a::inner::Sized::size (fn)",
            "a::more (mod)",
            "a::more::Point = a::Point",
            "a::more::make (fn)",
            "a::shape (mod)",
            "a::shape = a::form",
            "a::shape::Pair = a::form::Pair",
            "a::shape::shape = a::form",
        ]
    );
}

#[test]
#[should_panic(expected = "cannot resolve Missing in a")]
fn an_unknown_name_is_no_gap() {
    listed("pub use b::Missing;", "");
}

#[test]
#[should_panic(expected = "the macro other! is unknown")]
fn an_unknown_macro_is_no_gap() {
    listed("other! { Name }", "");
}
