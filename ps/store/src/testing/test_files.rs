//! In-memory files for tests: by name, as plain bytes or as the memory that has them open.
//!
//! Compiled only into tests and the simulator. May contain `unsafe` code, to read open files.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use super::store_trace;
use crate::arena::Memory;
use crate::layout::{Kind, PAGE_BYTES};

/// The contents of a file, without the zero pages at its end, which are most of most files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    head: Vec<u8>,
    length: usize,
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Content {
        Content::of(&bytes)
    }
}

impl From<Arc<Vec<u8>>> for Content {
    fn from(bytes: Arc<Vec<u8>>) -> Content {
        Content::of(&bytes)
    }
}

impl Content {
    /// Copies contents.
    pub fn of(bytes: &[u8]) -> Content {
        let used = bytes.chunks(PAGE_BYTES).rposition(|page| *page != ZEROS[..page.len()]);
        let head = bytes.len().min(used.map_or(0, |last| (last + 1) * PAGE_BYTES));
        Content { head: bytes[..head].to_vec(), length: bytes.len() }
    }

    /// Returns the contents with the zeros at their end.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = self.head.clone();
        bytes.resize(self.length, 0);
        bytes
    }

    /// Returns the word at this byte offset; `None` in the zeros at the end.
    pub fn word(&self, start: usize) -> Option<u64> {
        let bytes = self.head.get(start..start + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    /// Borrows a byte range for writing.
    ///
    /// # Panics
    /// If the range is not inside the file.
    pub fn stretch_mut(&mut self, start: usize, bytes: usize) -> &mut [u8] {
        let end = start + bytes;
        assert!(end <= self.length, "cannot borrow {bytes} bytes at {start}: the file ends");
        if end > self.head.len() {
            self.head.resize(end.next_multiple_of(PAGE_BYTES).min(self.length), 0);
        }
        &mut self.head[start..end]
    }
}

const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// The state of a file.
#[derive(Clone, Debug)]
pub(crate) enum TestFileState {
    /// These bytes. The file is not open.
    Closed(Content),
    /// The contents of a mapped memory.
    Open(Open),
}

/// The memory that has a file open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    address: usize,
    bytes: usize,
    /// The thread that opened the file.
    owner: ThreadId,
}

impl TestFileState {
    /// Returns the state of a file that this memory, on the caller's thread, has open.
    pub(crate) fn open(memory: &Memory) -> TestFileState {
        let owner = std::thread::current().id();
        TestFileState::Open(Open { address: memory.address(), bytes: memory.len(), owner })
    }
}

impl Open {
    /// Calls `reader` with the current contents.
    ///
    /// # Panics
    /// On a thread other than the owner's.
    fn read<T>(&self, reader: impl FnOnce(&[u8]) -> T) -> T {
        assert_eq!(
            self.owner,
            std::thread::current().id(),
            "another thread may be writing the file"
        );
        // SAFETY: an item is open only while its memory lives. Only its owner writes it, which is
        // this thread, and this thread is here.
        reader(unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) })
    }
}

/// Creates the memory for a file: shareable for values where the platform supports that, else
/// anonymous.
fn memory_for(name: &str, bytes: usize) -> Memory {
    let shareable = || Memory::shareable(bytes).ok();
    let memory = Some(name).filter(|name| name.starts_with(Kind::Values.name()));
    let memory = memory.and_then(|_| shareable()).map_or_else(|| Memory::anonymous(bytes), Ok);
    memory.expect("memory for a test")
}

/// A test file, shared with the memory that has it open.
#[derive(Clone, Debug)]
pub(crate) struct TestFile(Arc<Mutex<TestFileState>>);

impl TestFile {
    /// Notes that this memory, on the caller's thread, has the file open.
    pub(crate) fn opened_by(&self, memory: &Memory) {
        self.set(TestFileState::open(memory));
    }

    /// Keeps the bytes of the memory that had the file open, if [`TestFiles`] still lists the file.
    pub(crate) fn close(&self, bytes: &[u8]) {
        if Arc::strong_count(&self.0) > 1 {
            self.set(TestFileState::Closed(Content::of(bytes)));
        }
    }

    fn set(&self, item: TestFileState) {
        *self.0.lock().expect("no panic holds the lock") = item;
    }

    fn get(&self) -> TestFileState {
        self.0.lock().expect("no panic holds the lock").clone()
    }

    /// Returns the memory that has the file open, if any.
    fn opened(&self) -> Option<Open> {
        match &*self.0.lock().expect("no panic holds the lock") {
            TestFileState::Closed(_) => None,
            TestFileState::Open(open) => Some(*open),
        }
    }
}

/// Files by name, and their flushed contents.
#[derive(Clone, Debug, Default)]
pub struct TestFiles(Arc<Mutex<BTreeMap<String, TestFile>>>, Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl TestFiles {
    /// Creates a set of these files.
    pub fn with(files: BTreeMap<String, impl Into<Content>>) -> TestFiles {
        let found = |bytes| TestFile(Arc::new(Mutex::new(TestFileState::Closed(bytes))));
        let items = files.into_iter().map(|(name, bytes)| (name, found(bytes.into())));
        TestFiles(Arc::new(Mutex::new(items.collect())), Arc::default())
    }

    fn items(&self) -> MutexGuard<'_, BTreeMap<String, TestFile>> {
        self.0.lock().expect("no test panics while it holds the files")
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.items().keys().cloned().collect()
    }

    pub(crate) fn open(&self, name: &str) -> Option<Memory> {
        // The lock is not held here, because the store trace's watcher reads the files.
        let found = self.items().get(name)?.clone();
        let TestFileState::Closed(content) = found.get() else { panic!("{name} is open twice") };
        let mut memory = memory_for(name, content.length);
        memory.write(0, &content.head);
        found.opened_by(&memory);
        memory.test_file = Some(found);
        Some(memory)
    }

    pub(crate) fn create(&self, name: &str, bytes: usize) -> Memory {
        store_trace::filing();
        let mut memory = memory_for(name, bytes);
        let found = TestFile(Arc::new(Mutex::new(TestFileState::open(&memory))));
        memory.test_file = Some(found.clone());
        self.items().insert(name.to_owned(), found);
        memory
    }

    pub(crate) fn rename(&self, from: &str, to: &str) {
        store_trace::filing();
        let mut items = self.items();
        let item = items.remove(from).expect("the file exists");
        items.insert(to.to_owned(), item);
        let mut disk = self.disk();
        let flushed = disk.remove(from);
        disk.extend(flushed.map(|bytes| (to.to_owned(), bytes)));
    }

    pub(crate) fn remove(&self, name: &str) {
        store_trace::filing();
        self.items().remove(name);
    }

    /// Returns the name of the file that the memory at this address has open, if it is one of
    /// these files.
    pub fn name_of(&self, address: usize) -> Option<String> {
        let items = self.items();
        let held = |found: &TestFile| found.opened().is_some_and(|open| open.address == address);
        items.iter().find(|(_, found)| held(found)).map(|(name, _)| name.clone())
    }

    /// Returns whether this file is open.
    pub fn has_open(&self, name: &str) -> bool {
        self.items().get(name).is_some_and(|found| found.opened().is_some())
    }

    /// Returns a byte range of an open file.
    ///
    /// # Panics
    /// If the file is not open, or was opened on another thread.
    pub fn read(&self, name: &str, start: usize, bytes: usize) -> Vec<u8> {
        let open = self.items().get(name).and_then(TestFile::opened);
        open.expect("the file is open").read(|all| all[start..start + bytes].to_vec())
    }

    pub(crate) fn sync(&self, name: &str) {
        if let Some(content) = self.contents().get(name) {
            self.disk().insert(name.to_owned(), content.to_vec());
        }
    }

    pub(crate) fn write_durably(&self, name: &str, bytes: &[u8]) {
        store_trace::filing();
        let item = TestFile(Arc::new(Mutex::new(TestFileState::Closed(Content::of(bytes)))));
        self.items().insert(name.to_owned(), item);
        self.disk().insert(name.to_owned(), bytes.to_vec());
    }

    /// Returns the flushed files, as of their last flush.
    pub fn disk(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.1.lock().expect("no test panics while it holds the disk")
    }

    /// Returns the files that a process killed now would leave.
    ///
    /// # Panics
    /// If another thread has a file open.
    pub fn contents(&self) -> BTreeMap<String, Content> {
        let items = self.items();
        let files = items.iter().map(|(name, found)| {
            let content = match found.get() {
                TestFileState::Closed(content) => content,
                TestFileState::Open(open) => open.read(Content::of),
            };
            (name.clone(), content)
        });
        files.collect()
    }
}
