#![cfg(target_os = "linux")]

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;

use super::*;

/// A link through memory, and a second descriptor of each socket.
struct Link {
    out: LinkOut,
    at: LinkIn,
}

fn link() -> Link {
    let (near, far) = UnixStream::pair().unwrap();
    let (reader, descriptor) = PipeReader::create(4096).unwrap();
    let writer = PipeWriter::open(descriptor, 4096).unwrap();
    Link {
        out: LinkOut::new(near.into(), Some(writer)).unwrap(),
        at: LinkIn::new(far.into(), Some(reader)).unwrap(),
    }
}

fn write(out: &mut LinkOut, bytes: usize) -> io::Result<usize> {
    out.write(&[IoSlice::new(&vec![7; bytes])])
}

fn read(at: &mut LinkIn, bytes: usize) -> io::Result<usize> {
    at.read(&mut [IoSliceMut::new(&mut vec![0; bytes])])
}

fn is_readable(socket: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut sockets = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    poll(&mut sockets, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn a_receiver_that_sleeps_is_woken_once_by_the_next_bytes() {
    let Link { mut out, mut at } = link();
    assert!(would_block(&read(&mut at, 10)));
    write(&mut out, 5).unwrap();
    assert!(!is_readable(at.as_fd()), "it does not sleep");
    assert!(at.begin_wait().unwrap(), "bytes are there");
    assert_eq!(read(&mut at, 10).unwrap(), 5);
    assert!(would_block(&read(&mut at, 10)));
    assert!(!at.begin_wait().unwrap());
    write(&mut out, 3).unwrap();
    write(&mut out, 3).unwrap();
    assert!(is_readable(at.as_fd()));
    assert_eq!(read(&mut at, 10).unwrap(), 6);
    // The byte that woke it stays until the next wait.
    assert!(would_block(&read(&mut at, 10)));
    assert!(!is_readable(at.as_fd()));
}

#[test]
fn a_sender_that_sleeps_is_woken_by_room() {
    let Link { mut out, mut at } = link();
    assert_eq!(write(&mut out, 5000).unwrap(), 4096);
    assert!(would_block(&write(&mut out, 1)));
    assert!(out.waits_for_bytes() && !out.begin_wait().unwrap());
    assert_eq!(read(&mut at, 100).unwrap(), 100);
    assert!(is_readable(out.as_fd()));
    assert_eq!(write(&mut out, 5000).unwrap(), 100);
    assert!(would_block(&write(&mut out, 1)));
    assert!(!is_readable(out.as_fd()));
}

#[test]
fn the_end_of_the_sender_comes_after_its_last_byte() {
    let Link { mut out, mut at } = link();
    assert!(!at.begin_wait().unwrap());
    write(&mut out, 9).unwrap();
    drop(out);
    assert!(is_readable(at.as_fd()));
    assert_eq!(read(&mut at, 100).unwrap(), 9);
    assert!(would_block(&read(&mut at, 100)), "it has been woken by the bytes");
    assert!(!at.begin_wait().unwrap());
    assert!(is_readable(at.as_fd()));
    assert_eq!(read(&mut at, 100).unwrap(), 0);
}

#[test]
fn the_end_of_the_receiver_breaks_the_link_of_one_that_waits_for_room() {
    let Link { mut out, at } = link();
    write(&mut out, 4096).unwrap();
    assert!(!out.begin_wait().unwrap());
    drop(at);
    assert!(is_readable(out.as_fd()));
    assert_eq!(write(&mut out, 1).unwrap_err().kind(), ErrorKind::BrokenPipe);
}
