//! Files as tests keep them: by name, as plain bytes or as the memory that holds them now.
//!
//! Compiled into tests only. It may hold `unsafe` code: it reads what is open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use super::{Memory, witness};

/// What a file holds.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// These bytes; nobody has it open.
    Closed(Vec<u8>),
    /// What a memory holds.
    Open(Open),
}

/// Memory that holds a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    address: usize,
    bytes: usize,
    /// The thread that uses it.
    owner: ThreadId,
}

impl Item {
    /// A file that this memory, of the caller's thread, holds.
    pub(super) fn open(memory: &Memory) -> Item {
        let owner = std::thread::current().id();
        Item::Open(Open { address: memory.address(), bytes: memory.len(), owner })
    }
}

impl Open {
    /// A stretch of what it holds.
    ///
    /// # Panics
    /// On another thread than its owner's, and beyond its end.
    fn read(&self, start: usize, bytes: usize) -> Vec<u8> {
        assert_eq!(self.owner, std::thread::current().id(), "its owner may be writing it");
        assert!(start <= self.bytes && bytes <= self.bytes - start, "a stretch of the file");
        // SAFETY: an item is open only while its memory lives, and the stretch lies inside. Only
        // its owner writes it, which is this thread, and here.
        unsafe { std::slice::from_raw_parts((self.address as *const u8).add(start), bytes) }
            .to_vec()
    }
}

/// A file that somebody has open.
#[derive(Clone, Debug)]
pub(crate) struct Found(Arc<Mutex<Item>>);

impl Found {
    pub(super) fn set(&self, item: Item) {
        *self.0.lock().expect("nobody panics here") = item;
    }

    fn get(&self) -> Item {
        self.0.lock().expect("nobody panics here").clone()
    }

    /// Where the memory lies that has it open.
    fn opened(&self) -> Option<Open> {
        match &*self.0.lock().expect("nobody panics here") {
            Item::Closed(_) => None,
            Item::Open(open) => Some(*open),
        }
    }
}

/// Files by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shelf(Arc<Mutex<BTreeMap<String, Found>>>);

impl Shelf {
    /// A shelf with these files.
    pub(crate) fn with(files: BTreeMap<String, Vec<u8>>) -> Shelf {
        let found = |bytes| Found(Arc::new(Mutex::new(Item::Closed(bytes))));
        let items = files.into_iter().map(|(name, bytes)| (name, found(bytes)));
        Shelf(Arc::new(Mutex::new(items.collect())))
    }

    fn items(&self) -> MutexGuard<'_, BTreeMap<String, Found>> {
        self.0.lock().expect("no test panics while it holds a shelf")
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.items().keys().cloned().collect()
    }

    pub(super) fn open(&self, name: &str) -> Option<Memory> {
        // The shelf is not held: who watches the memory reads it.
        let found = self.items().get(name)?.clone();
        let Item::Closed(bytes) = found.get() else { panic!("{name} is open twice") };
        let mut memory = Memory::anonymous(bytes.len()).expect("memory for a test");
        memory.write(0, &bytes);
        found.set(Item::open(&memory));
        memory.found = Some(found);
        Some(memory)
    }

    pub(super) fn create(&self, name: &str, bytes: usize) -> Memory {
        witness::filing();
        let mut memory = Memory::anonymous(bytes).expect("memory for a test");
        let found = Found(Arc::new(Mutex::new(Item::open(&memory))));
        memory.found = Some(found.clone());
        self.items().insert(name.to_owned(), found);
        memory
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        witness::filing();
        let mut items = self.items();
        let item = items.remove(from).expect("it is there");
        items.insert(to.to_owned(), item);
    }

    pub(super) fn remove(&self, name: &str) {
        witness::filing();
        self.items().remove(name);
    }

    /// The name of the file that the memory at this address holds, if it is on this shelf.
    pub(crate) fn name_of(&self, address: usize) -> Option<String> {
        let items = self.items();
        let held = |found: &Found| found.opened().is_some_and(|open| open.address == address);
        items.iter().find(|(_, found)| held(found)).map(|(name, _)| name.clone())
    }

    /// What a file that is open holds in a stretch of it.
    ///
    /// # Panics
    /// If the file is not open, or this is not the thread that has it open.
    pub(crate) fn read(&self, name: &str, start: usize, bytes: usize) -> Vec<u8> {
        let open = self.items().get(name).and_then(Found::opened);
        open.expect("a file that is open").read(start, bytes)
    }

    /// What a process that is killed now leaves.
    ///
    /// # Panics
    /// If another thread has a file open.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let items = self.items();
        let files = items.iter().map(|(name, found)| {
            let bytes = match found.get() {
                Item::Closed(bytes) => bytes,
                Item::Open(open) => open.read(0, open.bytes),
            };
            (name.clone(), bytes)
        });
        files.collect()
    }
}
