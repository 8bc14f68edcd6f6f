//! The first page of every file of an arena, encoded and decoded as plain bytes.
//!
//! The page identifies the file, so that a file of another arena, shard, kind or generation is
//! never mistaken for the right one. `docs/arena.md` has a diagram.

use pushpull_common::ids::ShardId;

/// The size of the page in bytes.
pub const PAGE_BYTES: usize = 4096;

/// The magic bytes at the start of every file.
pub(crate) const MAGIC: [u8; 8] = *b"PUSHPULL";

/// The format of the files, incremented with every change to any of them. An arena of another
/// format is refused as such, and a checkpoint migrates its values.
pub const FORMAT: u32 = 12;

/// The contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The state of the shard and its clients.
    Control = 1,
    /// The transaction that is being committed.
    Intent = 2,
    /// Which block holds which logical block, and the pushes in the inbox.
    Tables = 3,
    /// Blocks of values.
    Values = 4,
    /// Blocks of optimizer slots.
    Slots = 5,
    /// The bodies of pushes.
    Inbox = 6,
    /// The contents of rows before they were changed in place.
    Undo = 7,
    /// The encoded catalogue.
    Catalogue = 8,
    /// A durable image: the control words and the tables at one commit.
    Image = 9,
    /// The index of a growing table.
    Index = 10,
    /// The rows of a growing table.
    Rows = 11,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 11] = [
        Kind::Control,
        Kind::Intent,
        Kind::Tables,
        Kind::Values,
        Kind::Slots,
        Kind::Inbox,
        Kind::Undo,
        Kind::Catalogue,
        Kind::Image,
        Kind::Index,
        Kind::Rows,
    ];

    /// Returns the start of the file's name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Control => "control",
            Kind::Intent => "intent",
            Kind::Tables => "tables",
            Kind::Values => "values",
            Kind::Slots => "slots",
            Kind::Inbox => "inbox",
            Kind::Undo => "undo",
            Kind::Catalogue => "catalogue",
            Kind::Image => "image",
            Kind::Index => "index",
            Kind::Rows => "rows",
        }
    }
}

/// The owner of a file: a shard and its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The shard.
    pub shard: ShardId,
    /// A random number drawn when the arena was created, unique to it.
    pub arena: u64,
}

/// The decoded first page of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// What the file holds.
    pub kind: Kind,
    /// The arena that the file belongs to.
    pub stamp: Stamp,
    /// The count of variable declarations; 0 for files that outlive a declaration.
    pub generation: u64,
    /// Text whose meaning depends on the kind. In the control file: the boot under which it was
    /// created, and the settings that must match the configuration.
    pub text: Vec<u8>,
}

/// The first deviation of a file from its expected contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The byte offset in the file.
    pub offset: u64,
    /// The expected contents and, where known, the actual contents.
    pub expected: String,
    /// The format of an intact page of another format: not a damaged file.
    pub other_format: Option<u32>,
}

impl Fault {
    /// Describes a fault at this byte, where `expected` must be.
    pub fn at(offset: usize, expected: impl Into<String>) -> Fault {
        Fault { offset: offset as u64, expected: expected.into(), other_format: None }
    }
}

const KIND_AT: usize = 12;
const SHARD_AT: usize = 16;
const ARENA_AT: usize = 24;
const GENERATION_AT: usize = 32;
const LENGTH_AT: usize = 40;
pub(crate) const TEXT_AT: usize = 48;
const CRC_AT: usize = PAGE_BYTES - 8;

/// The longest text of a page, in bytes.
pub(crate) const TEXT_BYTES_MAX: usize = CRC_AT - TEXT_AT;

impl Page {
    /// Encodes the page.
    ///
    /// # Panics
    /// If the text does not fit a page.
    pub fn encode(&self) -> Vec<u8> {
        assert!(
            self.text.len() <= TEXT_BYTES_MAX,
            "cannot encode a text of {} bytes",
            self.text.len()
        );
        let mut page = vec![0; PAGE_BYTES];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        page[KIND_AT..SHARD_AT].copy_from_slice(&(self.kind as u32).to_le_bytes());
        page[SHARD_AT..20].copy_from_slice(&self.stamp.shard.task.to_le_bytes());
        page[20..24].copy_from_slice(&u32::from(self.stamp.shard.shard).to_le_bytes());
        page[ARENA_AT..32].copy_from_slice(&self.stamp.arena.to_le_bytes());
        page[GENERATION_AT..40].copy_from_slice(&self.generation.to_le_bytes());
        page[LENGTH_AT..48].copy_from_slice(&(self.text.len() as u64).to_le_bytes());
        page[TEXT_AT..TEXT_AT + self.text.len()].copy_from_slice(&self.text);
        let crc = crc32c::crc32c(&page[..CRC_AT]);
        page[CRC_AT..].copy_from_slice(&u64::from(crc).to_le_bytes());
        page
    }

    /// Decodes a page from untrusted bytes.
    pub fn decode(bytes: &[u8]) -> Result<Page, Fault> {
        let page = bytes.get(..PAGE_BYTES).ok_or_else(|| {
            Fault::at(bytes.len(), format!("a first page of {PAGE_BYTES} bytes; the file ends"))
        })?;
        if page[..8] != MAGIC {
            return Err(Fault::at(0, format!("the magic bytes {MAGIC:?}, not {:?}", &page[..8])));
        }
        let format = u32_at(page, 8);
        let crc = u64::from(crc32c::crc32c(&page[..CRC_AT]));
        let found = u64_at(page, CRC_AT);
        if format != FORMAT {
            // Every format has had the page's checksum here.
            let other_format = (crc == found).then_some(format);
            return Err(Fault {
                other_format,
                ..Fault::at(8, format!("format {FORMAT}, not {format}"))
            });
        }
        if crc != found {
            return Err(Fault::at(CRC_AT, format!("the checksum {crc:#x}, not {found:#x}")));
        }
        let code = u32_at(page, KIND_AT);
        let kind = Kind::ALL.into_iter().find(|&kind| kind as u32 == code);
        let kind = kind.ok_or_else(|| Fault::at(KIND_AT, format!("a known kind, not {code}")))?;
        let shard = u16::try_from(u32_at(page, 20))
            .map_err(|_| Fault::at(20, "the number of a shard".to_owned()))?;
        let length = u64_at(page, LENGTH_AT);
        let text = usize::try_from(length).ok().filter(|&length| length <= TEXT_BYTES_MAX);
        let length = text.ok_or_else(|| {
            Fault::at(LENGTH_AT, format!("at most {TEXT_BYTES_MAX} bytes of text, not {length}"))
        })?;
        Ok(Page {
            kind,
            stamp: Stamp {
                shard: ShardId { task: u32_at(page, SHARD_AT), shard },
                arena: u64_at(page, ARENA_AT),
            },
            generation: u64_at(page, GENERATION_AT),
            text: page[TEXT_AT..TEXT_AT + length].to_vec(),
        })
    }

    /// Verifies that the page has this kind, stamp and generation.
    pub fn check(&self, kind: Kind, stamp: Stamp, generation: u64) -> Result<(), Fault> {
        if self.kind != kind {
            let expected = kind.name();
            let found = self.kind.name();
            return Err(Fault::at(KIND_AT, format!("a file of {expected}, not of {found}")));
        }
        if self.stamp.shard != stamp.shard {
            let expected = stamp.shard;
            let found = self.stamp.shard;
            return Err(Fault::at(SHARD_AT, format!("a file of {expected}, not of {found}")));
        }
        if self.stamp.arena != stamp.arena {
            let expected = stamp.arena;
            let found = self.stamp.arena;
            return Err(Fault::at(
                ARENA_AT,
                format!("a file of arena {expected:#x}, not of {found:#x}"),
            ));
        }
        if self.generation != generation {
            let found = self.generation;
            return Err(Fault::at(GENERATION_AT, format!("generation {generation}, not {found}")));
        }
        Ok(())
    }
}

fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from(u32_at(page, at)) | u64::from(u32_at(page, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let stamp = Stamp { shard: ShardId { task: 3, shard: 1 }, arena: 0x1234_5678_9abc_def0 };
        Page { kind: Kind::Values, stamp, generation: 7, text: b"text".to_vec() }
    }

    #[test]
    fn a_page_survives_encoding() {
        assert_eq!(Page::decode(&page().encode()), Ok(page()));
        page().check(Kind::Values, page().stamp, 7).unwrap();
    }

    #[test]
    fn flipped_bits_and_truncation_are_detected() {
        let bytes = page().encode();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                assert!(Page::decode(&flipped).is_err(), "bit {bit} of byte {at}");
            }
            assert!(Page::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_page_of_another_format_is_told_from_a_damaged_one() {
        let mut bytes = page().encode();
        bytes[8..12].copy_from_slice(&(FORMAT - 1).to_le_bytes());
        assert_eq!(Page::decode(&bytes).unwrap_err().other_format, None, "the checksum differs");
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&u64::from(crc).to_le_bytes());
        assert_eq!(Page::decode(&bytes).unwrap_err().other_format, Some(FORMAT - 1));
    }

    #[test]
    fn a_foreign_file_is_rejected_at_the_differing_field() {
        let stamp = page().stamp;
        let elsewhere = ShardId { task: 3, shard: 0 };
        let cases = [
            (page().check(Kind::Slots, stamp, 7), KIND_AT),
            (page().check(Kind::Values, Stamp { shard: elsewhere, ..stamp }, 7), SHARD_AT),
            (page().check(Kind::Values, Stamp { arena: 1, ..stamp }, 7), ARENA_AT),
            (page().check(Kind::Values, stamp, 8), GENERATION_AT),
        ];
        for (result, offset) in cases {
            assert_eq!(result.unwrap_err().offset, offset as u64);
        }
    }
}
