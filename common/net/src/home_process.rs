//! [`HomeProcess`]: the process in which something was started, which a child of `fork` is not.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::sync::Arc;

use memmap2::MmapMut;

/// The process that has started threads and connections.
///
/// A child of `fork` has its parent's memory and descriptors, and none of its threads. If it used
/// them, it would wait for threads that do not exist, and take frames from its parent's sockets.
/// So each operation checks that it is at home. On Linux the check reads a page that the kernel
/// zeroes in a child (`MADV_WIPEONFORK`). Elsewhere it calls `getpid`, which takes 50 to 100 ns.
#[derive(Clone, Debug)]
pub struct HomeProcess {
    id: u32,
    /// A page that is [`MARK`] in this process and 0 in its children.
    mark: Option<Arc<MmapMut>>,
}

const MARK: u8 = 1;

impl HomeProcess {
    /// Returns the running process. Allocates one page.
    pub fn current() -> HomeProcess {
        HomeProcess { id: std::process::id(), mark: marked_page().map(Arc::new) }
    }

    /// Returns whether the running process is another: a child of `fork`.
    pub fn is_elsewhere(&self) -> bool {
        match &self.mark {
            Some(page) => page[0] != MARK,
            None => std::process::id() != self.id,
        }
    }

    /// Returns the number of the process.
    pub fn id(&self) -> u32 {
        self.id
    }
}

/// Maps a page that is [`MARK`] in this process and 0 in its children. Returns `None` if the system
/// cannot do that.
#[cfg(target_os = "linux")]
fn marked_page() -> Option<MmapMut> {
    use rustix::mm::{Advice, madvise};

    let mut page = MmapMut::map_anon(1).ok()?;
    page[0] = MARK;
    let mut advise = |advice| {
        // SAFETY: the kernel refuses the first advice below, and the second changes no memory of this
        // process.
        unsafe { madvise(page.as_mut_ptr().cast(), page.len(), advice) }
    };
    // A private page without a file cannot be removed from one. An emulator that ignores advice says
    // that it was.
    if advise(Advice::LinuxRemove).is_ok() {
        return None;
    }
    advise(Advice::LinuxWipeOnFork).ok().map(|()| page)
}

#[cfg(not(target_os = "linux"))]
fn marked_page() -> Option<MmapMut> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_at_home_and_its_child_is_elsewhere() {
        let home = HomeProcess::current();
        assert!(home.mark.is_some(), "Linux has wiped pages of children since version 4.14");
        assert!(!home.is_elsewhere() && home.id() == std::process::id());
        let mut of_child = MmapMut::map_anon(1).unwrap();
        of_child[0] = 0;
        assert!(HomeProcess { mark: Some(Arc::new(of_child)), ..home }.is_elsewhere());
    }

    #[test]
    fn without_a_marked_page_the_number_of_the_process_tells() {
        let id = std::process::id();
        assert!(!HomeProcess { id, mark: None }.is_elsewhere());
        assert!(HomeProcess { id: id + 1, mark: None }.is_elsewhere());
    }
}
