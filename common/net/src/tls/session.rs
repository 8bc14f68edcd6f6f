//! [`TlsSession`]: the TLS of one stream, between its frames and its socket.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_common::ids::RequestId;
use rustls::Connection;
use tokio::net::TcpStream;

/// A socket below TLS, whose reads and writes return instead of waiting.
pub(crate) trait TlsSocket {
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize>;

    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;
}

impl TlsSocket for TcpStream {
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.try_read(bytes)
    }

    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write_vectored(slices)
    }
}

impl TlsSocket for std::net::TcpStream {
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        (&*self).read(bytes)
    }

    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(slices)
    }
}

/// The TLS of one stream.
///
/// A write reports a byte as written once the socket has all of its record. So a caller that has
/// written everything need not come back for the sake of TLS.
pub(crate) struct TlsSession(Mutex<TlsState>);

/// Invariants: `start <= end <= received.len()`. Bytes are decrypted only while there is no
/// plaintext, so that plaintext is never more than a read of the socket.
struct TlsState {
    connection: Connection,
    /// Bytes of the socket that are not decrypted yet, from `start` to `end`.
    received: Vec<u8>,
    start: usize,
    end: usize,
    /// The plaintext that a read has not taken, in bytes.
    plaintext: usize,
    /// Whether the last byte of the records that wait for the socket is not reported as written.
    withheld: bool,
    failed: bool,
    /// The plaintext of all time, in bytes.
    decrypted: usize,
}

/// What a handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeStep {
    /// It is done.
    Done,
    /// The peer must send.
    Read,
    /// The socket must take what is to be sent.
    Write,
}

impl TlsSession {
    pub(crate) fn new(connection: Connection) -> TlsSession {
        TlsSession(Mutex::new(TlsState {
            connection,
            received: vec![0; RECEIVED_BYTES_MIN],
            start: 0,
            end: 0,
            plaintext: 0,
            withheld: false,
            failed: false,
            decrypted: 0,
        }))
    }

    /// Continues the handshake as far as the socket allows.
    pub(crate) fn handshake(&self, socket: &impl TlsSocket) -> io::Result<HandshakeStep> {
        let mut state = self.state();
        loop {
            if !state.send(socket)? {
                return Ok(HandshakeStep::Write);
            }
            if !state.connection.is_handshaking() {
                return Ok(HandshakeStep::Done);
            }
            match state.decrypt(socket) {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(HandshakeStep::Read);
                }
                Err(error) => {
                    // The alert tells a peer that speaks TLS what is wrong.
                    if !state.received.starts_with(PLAIN) {
                        let _ = state.send(socket);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Returns the request of the frame that the peer has sent instead of TLS; 0 if it has not all
    /// arrived. `None` if it was no frame.
    pub(crate) fn plain_request(&self) -> Option<RequestId> {
        let state = self.state();
        let frame = state.received.get(..state.end)?;
        frame.starts_with(PLAIN).then(|| {
            let request = frame.get(REQUEST).and_then(|bytes| bytes.try_into().ok());
            RequestId(request.map_or(0, u64::from_le_bytes))
        })
    }

    /// Returns whether bytes are there that a read has not taken, decrypted or not.
    pub(crate) fn has_received(&self) -> bool {
        let state = self.state();
        state.plaintext > 0 || state.start < state.end
    }

    /// Uses the connection.
    pub(crate) fn with<R>(&self, take: impl FnOnce(&Connection) -> R) -> R {
        take(&self.state().connection)
    }

    /// Reads the available plaintext. Returns 0 at the end, which the peer need not have announced:
    /// frames have lengths, so a cut is noticed without it.
    pub(crate) fn read(
        &self,
        slices: &mut [IoSliceMut<'_>],
        socket: &impl TlsSocket,
    ) -> io::Result<usize> {
        let mut state = self.state();
        let mut read = 0;
        let mut empty = 0;
        for slice in slices {
            let mut rest = &mut slice[..];
            while !rest.is_empty() {
                if state.plaintext == 0 {
                    // What is there goes to the caller before the socket is asked again.
                    let has_received = state.start < state.end;
                    if read > 0 && !has_received {
                        return Ok(read);
                    }
                    match state.decrypt(socket) {
                        // Records without plaintext keep no thread from its other work.
                        Ok(true) if state.plaintext == 0 && empty == EMPTY_MAX => {
                            return Err(io::ErrorKind::WouldBlock.into());
                        }
                        Ok(true) => {
                            empty += 1;
                            continue;
                        }
                        Err(_) if read > 0 => return Ok(read),
                        ended => return ended.map(|_| read),
                    }
                }
                let count = state.connection.reader().read(rest)?;
                state.plaintext -= count;
                read += count;
                rest = &mut rest[count..];
            }
        }
        Ok(read)
    }

    /// Writes as much as the socket takes. The slices begin with the bytes that the last write did
    /// not report.
    pub(crate) fn write(
        &self,
        slices: &[IoSlice<'_>],
        socket: &impl TlsSocket,
    ) -> io::Result<usize> {
        let mut state = self.state();
        if !state.send(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let before = usize::from(std::mem::take(&mut state.withheld));
        let encrypted = state.encrypt(slices, before)?;
        if encrypted > 0 && !state.send(socket)? {
            state.withheld = true;
            return match before + encrypted - 1 {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                written => Ok(written),
            };
        }
        Ok(before + encrypted)
    }

    fn state(&self) -> MutexGuard<'_, TlsState> {
        // After a panic the records would be out of step, and the peer ends the connection.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TlsState {
    /// Sends the records that wait. Returns whether the socket has taken all.
    fn send(&mut self, socket: &impl TlsSocket) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Records(socket)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Encrypts bytes of the slices, behind the first `skipped`. Returns how many.
    fn encrypt(&mut self, slices: &[IoSlice<'_>], mut skipped: usize) -> io::Result<usize> {
        let mut chosen = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        let mut room = ENCRYPTED_BYTES_MAX;
        for slice in slices {
            let from = skipped.min(slice.len());
            skipped -= from;
            let bytes = &slice[from..];
            let bytes = &bytes[..bytes.len().min(room)];
            room -= bytes.len();
            if count == SLICES_MAX || room == 0 && bytes.is_empty() {
                break;
            }
            if !bytes.is_empty() {
                chosen[count] = IoSlice::new(bytes);
                count += 1;
            }
        }
        self.connection.writer().write_vectored(&chosen[..count])
    }

    /// Decrypts received bytes, or else reads more of them. Returns false at the end of the stream.
    fn decrypt(&mut self, socket: &impl TlsSocket) -> io::Result<bool> {
        // TLS that has failed repeats its error.
        if self.start == self.end && !self.failed {
            let count = socket.receive(&mut self.received)?;
            (self.start, self.end) = (0, count);
            if count == 0 {
                return Ok(false);
            }
        }
        if !self.failed {
            let mut bytes = &self.received[self.start..self.end];
            self.start += self.connection.read_tls(&mut bytes)?;
        }
        let processed = self.connection.process_new_packets();
        self.failed = processed.is_err();
        let state = processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.plaintext = state.plaintext_bytes_to_read();
        if state.peer_has_closed() && self.plaintext == 0 {
            return Ok(false);
        }
        self.decrypted += self.plaintext;
        // A full read announces more. A connection without much traffic needs little memory, and one
        // that has only said hello gets no more.
        let filled = self.end == self.received.len();
        if self.start == self.end && filled && self.decrypted >= GROWS_AFTER_BYTES {
            let larger = (4 * self.received.len()).min(RECEIVED_BYTES_MAX);
            self.received.resize(larger, 0);
        }
        Ok(true)
    }
}

impl fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsSession")
    }
}

/// The socket as the writer of records.
struct Records<'a, S>(&'a S);

impl<S: TlsSocket> Write for Records<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The first bytes of a frame, and where its request is.
const PLAIN: &[u8] = b"ppsh";
const REQUEST: std::ops::Range<usize> = 24..32;

/// The bytes of one read of the socket: a few records of small frames, and after a full read those
/// of a body.
const RECEIVED_BYTES_MIN: usize = 4 << 10;
const RECEIVED_BYTES_MAX: usize = 256 << 10;

/// The plaintext after which a connection gets more memory for reads: more than a hello.
const GROWS_AFTER_BYTES: usize = 64 << 10;

/// The most steps of one read that yield no plaintext.
const EMPTY_MAX: usize = 256;

/// The most bytes that one write encrypts: their records are a copy until the socket takes them.
const ENCRYPTED_BYTES_MAX: usize = 256 << 10;

/// The most slices of one write.
const SLICES_MAX: usize = 64;

#[cfg(test)]
mod tests;
