//! Files as tests keep them: by name, as plain bytes or as the memory that holds them now.
//!
//! Compiled into tests and the bug zoo only. It may hold `unsafe` code: it reads what is open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::Memory;

/// What a file holds.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// These bytes; nobody has it open.
    Closed(Arc<Vec<u8>>),
    /// What lies at this address, so many bytes.
    Open(usize, usize),
}

/// A file that somebody has open.
#[derive(Clone, Debug)]
pub(crate) struct Found(Arc<Mutex<Item>>);

impl Found {
    pub(crate) fn set(&self, item: Item) {
        *self.0.lock().expect("nobody panics here") = item;
    }

    /// Whether somebody else may still look for it.
    pub(super) fn is_kept(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    fn get(&self) -> Item {
        self.0.lock().expect("nobody panics here").clone()
    }
}

/// Files by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shelf(Arc<Mutex<BTreeMap<String, Found>>>, Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl Shelf {
    /// A shelf with these files.
    pub(crate) fn with(files: BTreeMap<String, impl Into<Arc<Vec<u8>>>>) -> Shelf {
        let found = |bytes: Arc<Vec<u8>>| Found(Arc::new(Mutex::new(Item::Closed(bytes))));
        let items = files.into_iter().map(|(name, bytes)| (name, found(bytes.into())));
        Shelf(Arc::new(Mutex::new(items.collect())), Arc::default())
    }

    fn items(&self) -> MutexGuard<'_, BTreeMap<String, Found>> {
        self.0.lock().expect("no test panics while it holds a shelf")
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.items().keys().cloned().collect()
    }

    pub(super) fn open(&self, name: &str) -> Option<Memory> {
        let items = self.items();
        let found = items.get(name)?;
        let Item::Closed(bytes) = found.get() else { panic!("{name} is open twice") };
        let mut memory = Memory::anonymous(bytes.len()).expect("memory for a test");
        // New memory is zeros: pages of them are left untouched.
        for (page, bytes) in bytes.chunks(4096).enumerate().filter(|(_, page)| !is_zero(page)) {
            memory.write(page * 4096, bytes);
        }
        found.set(Item::Open(memory.address(), memory.len()));
        memory.found = Some(found.clone());
        Some(memory)
    }

    pub(super) fn create(&self, name: &str, bytes: usize) -> Memory {
        let mut memory = Memory::anonymous(bytes).expect("memory for a test");
        let found = Found(Arc::new(Mutex::new(Item::Open(memory.address(), memory.len()))));
        memory.found = Some(found.clone());
        self.items().insert(name.to_owned(), found);
        memory
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        let mut items = self.items();
        let item = items.remove(from).expect("it is there");
        items.insert(to.to_owned(), item);
        let mut disk = self.disk();
        let flushed = disk.remove(from);
        disk.extend(flushed.map(|bytes| (to.to_owned(), bytes)));
    }

    pub(super) fn remove(&self, name: &str) {
        self.items().remove(name);
    }

    pub(super) fn sync(&self, name: &str) {
        // SAFETY: nobody writes while a test's only thread is here.
        let contents = unsafe { self.contents() };
        if let Some(bytes) = contents.get(name) {
            self.disk().insert(name.to_owned(), bytes.clone());
        }
    }

    pub(super) fn write_durably(&self, name: &str, bytes: &[u8]) {
        let item = Found(Arc::new(Mutex::new(Item::Closed(bytes.to_vec().into()))));
        self.items().insert(name.to_owned(), item);
        self.disk().insert(name.to_owned(), bytes.to_vec());
    }

    /// What was put on the disk, as it was then.
    pub(crate) fn disk(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.1.lock().expect("no test panics while it holds a disk")
    }

    /// What a process that is killed now leaves.
    ///
    /// # Safety
    /// Nothing may write to the memory of the files meanwhile.
    pub(crate) unsafe fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let items = self.items();
        let files = items.iter().map(|(name, item)| {
            let bytes = match item.get() {
                Item::Closed(bytes) => bytes.to_vec(),
                // SAFETY: by the caller's promise.
                Item::Open(at, bytes) => unsafe { super::witness::contents(at, bytes) },
            };
            (name.clone(), bytes)
        });
        files.collect()
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) == 0
}
