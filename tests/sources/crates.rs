//! The items of the workspace's crates and the names by which modules know them, read from sources.
//!
//! The reader sees what a build with every feature for users sees on Linux. It panics where it does
//! not understand a source, so that no check passes because of what it has not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::punctuated::Punctuated;
use syn::{Attribute, Item, Meta, Token, UseTree, Visibility};

use super::macro_expansion::MacroRules;

/// The crates of the workspace, by the names that sources use.
pub(crate) const CRATES: &[(&str, &str)] = &[
    ("pushpull", "."),
    ("pushpull_checkpoint", "common/checkpoint"),
    ("pushpull_common", "common"),
    ("pushpull_device", "worker/device"),
    ("pushpull_net", "common/net"),
    ("pushpull_optim", "common/optim"),
    ("pushpull_ps", "ps"),
    ("pushpull_remote", "ps/remote"),
    ("pushpull_collective", "worker/collective"),
    ("pushpull_services", "worker/services"),
    ("pushpull_store", "ps/store"),
    ("pushpull_training", "worker/training"),
    ("pushpull_worker", "worker"),
];

/// The crates of others whose items this workspace re-exports.
const FOREIGN: &[&str] = &["half"];

/// The features that only tests turn on.
const TEST_FEATURES: &[&str] = &["simulation", "testing"];

/// An index into [`Crates::modules`].
pub(crate) type ModuleId = usize;

/// All modules of the crates that were read.
#[derive(Default)]
pub(crate) struct Crates {
    roots: BTreeMap<String, ModuleId>,
    modules: Vec<Module>,
}

pub(crate) struct Module {
    path: String,
    parent: Option<ModuleId>,
    items: Vec<Item>,
    children: BTreeMap<String, ModuleId>,
}

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Definition {
    Module(ModuleId),
    /// The item at this index of a module.
    Item(ModuleId, usize),
    /// An item of another crate, by its path.
    Foreign(String),
}

/// A name that a module declares or imports.
pub(crate) struct Name {
    pub(crate) text: String,
    pub(crate) is_public: bool,
    /// Whether it has no visibility at all: only its module and those below see it.
    is_private: bool,
    pub(crate) is_hidden: bool,
    target: Target,
}

enum Target {
    Definition(Definition),
    Path(Vec<String>),
    /// All public names of the module at this path.
    Glob(Vec<String>),
}

impl Crates {
    /// Reads every crate of [`CRATES`].
    pub(crate) fn read() -> Crates {
        let mut crates = Crates::default();
        for (name, folder) in CRATES {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join("src/lib.rs");
            crates.add(name, parsed(&file).items, file.parent().unwrap());
        }
        crates
    }

    /// Adds a crate with the items of its root; the files of its modules are in the folder.
    pub(crate) fn add(&mut self, name: &str, items: Vec<Item>, folder: &Path) {
        let first = self.modules.len();
        let root = self.add_module(name.to_owned(), None, items, folder);
        self.roots.insert(name.to_owned(), root);
        let mut macros = BTreeMap::new();
        for item in self.modules[first..].iter().flat_map(|module| &module.items) {
            if let Item::Macro(item) = item
                && let Some(name) = &item.ident
            {
                let rules = MacroRules::new(item.mac.tokens.clone());
                let rules = rules.unwrap_or_else(|fault| panic!("{name}!: {fault}"));
                let earlier = macros.insert(name.to_string(), rules);
                assert!(earlier.is_none(), "two macros have the name {name}");
            }
        }
        for module in &mut self.modules[first..] {
            let items = std::mem::take(&mut module.items);
            module.items = items.into_iter().flat_map(|item| expanded(item, &macros)).collect();
        }
    }

    fn add_module(
        &mut self,
        path: String,
        parent: Option<ModuleId>,
        items: Vec<Item>,
        folder: &Path,
    ) -> ModuleId {
        let id = self.modules.len();
        self.modules.push(Module {
            path: path.clone(),
            parent,
            items: Vec::new(),
            children: BTreeMap::new(),
        });
        let built = items.into_iter().filter(|item| is_built(attributes(item)));
        let mut items: Vec<Item> = built.collect();
        for item in &mut items {
            let Item::Mod(module) = item else { continue };
            let name = module.ident.to_string();
            let below = folder.join(&name);
            let is_elsewhere =
                module.attrs.iter().any(|attribute| attribute.path().is_ident("path"));
            assert!(!is_elsewhere, "{path}::{name} has a path attribute");
            let items = match module.content.take() {
                Some((_, items)) => items,
                None => {
                    let files = [folder.join(format!("{name}.rs")), below.join("mod.rs")];
                    let file = files.iter().find(|file| file.exists());
                    parsed(file.unwrap_or_else(|| panic!("{path}::{name} has no file"))).items
                }
            };
            let child = self.add_module(format!("{path}::{name}"), Some(id), items, &below);
            self.modules[id].children.insert(name, child);
        }
        self.modules[id].items = items;
        id
    }

    /// Returns the root of a crate.
    pub(crate) fn root(&self, name: &str) -> ModuleId {
        self.roots[name]
    }

    /// Returns the path at which a module is declared.
    pub(crate) fn path(&self, module: ModuleId) -> &str {
        &self.modules[module].path
    }

    /// Yields all modules.
    pub(crate) fn all(&self) -> std::ops::Range<ModuleId> {
        0..self.modules.len()
    }

    /// Returns the items of a module, with those that macros declare.
    pub(crate) fn items(&self, module: ModuleId) -> &[Item] {
        &self.modules[module].items
    }

    /// Returns the names that a module declares or imports, globs resolved.
    pub(crate) fn names(&self, module: ModuleId) -> Vec<Name> {
        let mut names = Vec::new();
        for name in self.declared_names(module) {
            let Target::Glob(path) = &name.target else {
                names.push(name);
                continue;
            };
            let of = self.resolve(module, path).into_iter().find_map(|definition| {
                if let Definition::Module(of) = definition { Some(of) } else { None }
            });
            let of = of.unwrap_or_else(|| self.fail(module, path));
            names.extend(self.names(of).into_iter().filter(|name| name.is_public).map(|inner| {
                let path = path.iter().cloned().chain([inner.text.clone()]).collect();
                Name { is_public: name.is_public, target: Target::Path(path), ..inner }
            }));
        }
        names
    }

    /// Returns the globs by which a module re-exports names, after its path.
    pub(crate) fn public_globs(&self, module: ModuleId) -> Vec<String> {
        let names = self.declared_names(module).into_iter().filter(|name| name.is_public);
        let globs = names.filter_map(|name| match name.target {
            Target::Glob(path) => Some(format!("{}: {}::*", self.path(module), path.join("::"))),
            _ => None,
        });
        globs.collect()
    }

    /// Returns what a name of a module stands for: at least one definition, at most one of each
    /// namespace.
    pub(crate) fn definitions(&self, module: ModuleId, name: &Name) -> Vec<Definition> {
        let definitions = match &name.target {
            Target::Definition(definition) => vec![definition.clone()],
            Target::Path(path) | Target::Glob(path) => self.resolve(module, path),
        };
        if definitions.is_empty() {
            self.fail(module, std::slice::from_ref(&name.text));
        }
        definitions
    }

    /// Returns what a path stands for where a module uses it; nothing if that is unknown.
    pub(crate) fn resolve(&self, module: ModuleId, path: &[String]) -> Vec<Definition> {
        self.resolve_unless_seen(module, path, &mut BTreeSet::new()).into_iter().collect()
    }

    fn fail(&self, module: ModuleId, path: &[String]) -> ! {
        panic!("cannot resolve {} in {}", path.join("::"), self.path(module))
    }

    fn resolve_unless_seen(
        &self,
        user: ModuleId,
        path: &[String],
        seen: &mut BTreeSet<(ModuleId, String)>,
    ) -> BTreeSet<Definition> {
        let mut found = BTreeSet::from([Definition::Module(user)]);
        for (place, segment) in path.iter().enumerate() {
            let modules = found.into_iter().filter_map(|definition| {
                if let Definition::Module(module) = definition { Some(module) } else { None }
            });
            let modules: Vec<ModuleId> = modules.collect();
            found = BTreeSet::new();
            for module in modules {
                match segment.as_str() {
                    "crate" => {
                        let name = self.path(module).split("::").next().unwrap_or_default();
                        found.insert(Definition::Module(self.roots[name]));
                    }
                    "self" => _ = found.insert(Definition::Module(module)),
                    "super" => found.extend(self.modules[module].parent.map(Definition::Module)),
                    name => {
                        found.extend(self.look_up(module, name, user, seen));
                        if found.is_empty() && place == 0 {
                            found.extend(self.roots.get(name).copied().map(Definition::Module));
                        }
                    }
                }
            }
            if found.is_empty() && place == 0 && FOREIGN.contains(&segment.as_str()) {
                return BTreeSet::from([Definition::Foreign(path.join("::"))]);
            }
        }
        found
    }

    /// Returns what a name in a module stands for where the module `user` uses it.
    fn look_up(
        &self,
        module: ModuleId,
        text: &str,
        user: ModuleId,
        seen: &mut BTreeSet<(ModuleId, String)>,
    ) -> BTreeSet<Definition> {
        let mut found = BTreeSet::new();
        let names = self.declared_names(module);
        let own = |name: &&Name| name.text == text && self.sees(user, module, name);
        for name in names.iter().filter(own) {
            match &name.target {
                Target::Definition(definition) => _ = found.insert(definition.clone()),
                // An import of its own name, as that of a function beside its module, ends here.
                Target::Path(path) if seen.insert((module, text.to_owned())) => {
                    found.extend(self.resolve_unless_seen(module, path, seen));
                    seen.remove(&(module, text.to_owned()));
                }
                Target::Path(_) | Target::Glob(_) => {}
            }
        }
        if found.is_empty() && seen.insert((module, text.to_owned())) {
            for name in &names {
                let Target::Glob(path) = &name.target else { continue };
                for definition in self.resolve_unless_seen(module, path, seen) {
                    if let Definition::Module(of) = definition {
                        found.extend(self.look_up(of, text, user, seen));
                    }
                }
            }
            seen.remove(&(module, text.to_owned()));
        }
        found
    }

    /// Returns whether a module can use a name of another one.
    fn sees(&self, user: ModuleId, module: ModuleId, name: &Name) -> bool {
        let user = format!("{}::", self.path(user));
        let of = self.path(module);
        let within = if name.is_private { of } else { of.split("::").next().unwrap_or_default() };
        name.is_public || user.starts_with(&format!("{within}::"))
    }

    /// Returns the names that the items of a module bring in, in their order.
    fn declared_names(&self, id: ModuleId) -> Vec<Name> {
        let module = &self.modules[id];
        let mut names = Vec::new();
        for (index, item) in module.items.iter().enumerate() {
            let is_hidden = is_hidden(attributes(item));
            let mut declare = |ident: &syn::Ident, visibility: &Visibility| {
                let definition = match module.children.get(&ident.to_string()) {
                    Some(child) if matches!(item, Item::Mod(_)) => Definition::Module(*child),
                    _ => Definition::Item(id, index),
                };
                names.push(Name {
                    text: ident.to_string(),
                    is_public: is_public(visibility),
                    is_private: matches!(visibility, Visibility::Inherited),
                    is_hidden,
                    target: Target::Definition(definition),
                });
            };
            match item {
                Item::Const(item) => declare(&item.ident, &item.vis),
                Item::Enum(item) => declare(&item.ident, &item.vis),
                Item::Fn(item) => declare(&item.sig.ident, &item.vis),
                Item::Mod(item) => declare(&item.ident, &item.vis),
                Item::Static(item) => declare(&item.ident, &item.vis),
                Item::Struct(item) => declare(&item.ident, &item.vis),
                Item::Trait(item) => declare(&item.ident, &item.vis),
                Item::Type(item) => declare(&item.ident, &item.vis),
                Item::Use(item) => {
                    let mut targets = Vec::new();
                    add_imports(&item.tree, &[], &mut targets);
                    names.extend(targets.into_iter().map(|(text, target)| Name {
                        text,
                        is_public: is_public(&item.vis),
                        is_private: matches!(item.vis, Visibility::Inherited),
                        is_hidden,
                        target,
                    }));
                }
                Item::Impl(_) | Item::Macro(_) => {}
                _ => panic!("{} has an item of an unknown kind", module.path),
            }
        }
        names
    }
}

fn parsed(file: &PathBuf) -> syn::File {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"))
}

/// Returns the items that an invocation of a macro declares, and any other item as it is.
fn expanded(item: Item, macros: &BTreeMap<String, MacroRules>) -> Vec<Item> {
    let Item::Macro(invocation) = &item else { return vec![item] };
    if invocation.ident.is_some() {
        let is_exported =
            invocation.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export"));
        assert!(!is_exported, "exported macros are not read");
        return Vec::new();
    }
    let name = invocation.mac.path.segments.last().unwrap().ident.to_string();
    let rules = macros.get(&name).unwrap_or_else(|| panic!("the macro {name}! is unknown"));
    let items = rules.expand(&invocation.mac.tokens);
    let items = items.unwrap_or_else(|fault| panic!("cannot expand {name}!: {fault}"));
    items.into_iter().filter(|item| is_built(attributes(item))).collect()
}

fn add_imports(tree: &UseTree, before: &[String], targets: &mut Vec<(String, Target)>) {
    let with = |name: &syn::Ident| {
        let own = (name != "self" || before.is_empty()).then(|| name.to_string());
        before.iter().cloned().chain(own).collect::<Vec<String>>()
    };
    match tree {
        UseTree::Path(path) => add_imports(&path.tree, &with(&path.ident), targets),
        UseTree::Name(name) => {
            let path = with(&name.ident);
            targets.push((path.last().unwrap().clone(), Target::Path(path)));
        }
        UseTree::Rename(rename) => {
            targets.push((rename.rename.to_string(), Target::Path(with(&rename.ident))));
        }
        UseTree::Glob(_) => targets.push(("*".to_owned(), Target::Glob(before.to_vec()))),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| add_imports(tree, before, targets));
        }
    }
}

pub(crate) fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns whether documentation leaves an item out.
pub(crate) fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("doc")
            && attribute.parse_args::<syn::Ident>().is_ok_and(|argument| argument == "hidden")
    })
}

/// Returns whether a build for users has an item with these attributes.
pub(crate) fn is_built(attributes: &[Attribute]) -> bool {
    let mut conditions = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.all(|attribute| is_true(&attribute.parse_args().unwrap()))
}

/// Returns whether a condition of a `cfg` holds.
fn is_true(condition: &Meta) -> bool {
    let name = condition.path().get_ident().map(ToString::to_string).unwrap_or_default();
    match condition {
        Meta::Path(_) => match name.as_str() {
            "test" | "doctest" | "doc" | "fuzzing" | "debug_assertions" => false,
            "unix" => true,
            _ => panic!("the condition {name} is unknown"),
        },
        Meta::List(list) => {
            let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            let mut inner = inner.unwrap().into_iter();
            match name.as_str() {
                "all" => inner.all(|condition| is_true(&condition)),
                "any" => inner.any(|condition| is_true(&condition)),
                "not" => !inner.any(|condition| is_true(&condition)),
                _ => panic!("the condition {name} is unknown"),
            }
        }
        Meta::NameValue(pair) => {
            let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(value), .. }) = &pair.value else {
                panic!("the condition {name} has no text");
            };
            match name.as_str() {
                "feature" => !TEST_FEATURES.contains(&value.value().as_str()),
                "target_os" => value.value() == "linux",
                "target_arch" => value.value() == "x86_64",
                _ => panic!("the condition {name} is unknown"),
            }
        }
    }
}

/// Returns the attributes of an item.
pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => panic!("an item has an unknown kind"),
    }
}
