//! What stands for `testing` in a product: no test file exists, and no store is reported.
//!
//! The compiler removes every use of it, so that the paths of the product need no conditions.

/// The trace of no store.
pub(crate) mod store_trace {
    #[inline]
    pub(crate) fn borrowed(_address: usize, _start: usize, _bytes: usize) {}

    #[inline]
    pub(crate) fn storing(_address: usize, _start: usize) {}

    #[inline]
    pub(crate) fn streaming(_address: usize, _start: usize, _bytes: usize) {}

    #[inline]
    pub(crate) fn fenced() {}

    #[inline]
    pub(crate) fn moved(_from: usize, _to: usize) {}
}

/// A file system that is not full.
pub(crate) mod full_disk {
    #[inline]
    pub(crate) fn check() -> std::io::Result<()> {
        Ok(())
    }
}

/// Files that do not exist.
pub(crate) mod test_files {
    use crate::arena::Memory;

    /// A set of files without a value.
    #[derive(Clone, Debug)]
    pub enum TestFiles {}

    impl TestFiles {
        pub(crate) fn names(&self) -> Vec<String> {
            match *self {}
        }

        pub(crate) fn open(&self, _name: &str) -> Option<Memory> {
            match *self {}
        }

        pub(crate) fn create(&self, _name: &str, _bytes: usize) -> Memory {
            match *self {}
        }

        pub(crate) fn rename(&self, _from: &str, _to: &str) {
            match *self {}
        }

        pub(crate) fn remove(&self, _name: &str) {
            match *self {}
        }

        pub(crate) fn sync(&self, _name: &str) {
            match *self {}
        }

        pub(crate) fn write_durably(&self, _name: &str, _bytes: &[u8]) {
            match *self {}
        }
    }

    /// A file without a value.
    #[derive(Debug)]
    pub(crate) enum TestFile {}

    impl TestFile {
        pub(crate) fn opened_by(&self, _memory: &Memory) {
            match *self {}
        }

        pub(crate) fn close(&self, _bytes: &[u8]) {
            match *self {}
        }
    }
}
