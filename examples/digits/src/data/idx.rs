//! The IDX format of MNIST and related datasets, read from files that may be broken or hostile.
//!
//! A file is a big-endian header and one byte per pixel or label:
//!
//! ```text
//! images: 0x00000803, count, rows, columns, then count * rows * columns pixels
//! labels: 0x00000801, count, then count labels
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::{CLASSES, DataError, Dataset};

/// Reads a file of images and the file of their labels, each plain or with the suffix `.gz`.
pub(super) fn load(
    directory: &Path,
    images: &'static str,
    labels: &'static str,
) -> Result<Dataset, DataError> {
    pair(IdxSource::open(directory, images)?, IdxSource::open(directory, labels)?)
}

fn pair(mut images: IdxSource, mut labels: IdxSource) -> Result<Dataset, DataError> {
    // The labels are read first: they are small, and give the expected number of images.
    let label_values = read_labels(&mut labels)?;
    let (width, features) = read_images(&mut images, &labels, label_values.len())?;
    Ok(Dataset { features, width, labels: label_values, classes: CLASSES })
}

fn read_labels(source: &mut IdxSource) -> Result<Vec<u8>, DataError> {
    source.magic(LABELS_MAGIC)?;
    let count = source.number("labels", COUNT_MAX)?;
    let begin = source.offset;
    let mut labels = Vec::new();
    source.payload(count, |bytes| labels.extend_from_slice(bytes))?;
    match labels.iter().position(|&label| usize::from(label) >= CLASSES) {
        None => Ok(labels),
        Some(position) => Err(DataError::LabelOutOfRange {
            file: source.file.clone(),
            offset: begin + position as u64,
            found: labels[position],
            classes: CLASSES,
        }),
    }
}

/// Returns the number of pixels of one image and the values of all images.
fn read_images(
    source: &mut IdxSource,
    labels: &IdxSource,
    label_count: usize,
) -> Result<(usize, Vec<f32>), DataError> {
    source.magic(IMAGES_MAGIC)?;
    let count = source.number("images", COUNT_MAX)?;
    if count != label_count as u64 {
        return Err(DataError::CountMismatch {
            images: source.file.clone(),
            image_count: count as usize,
            labels: labels.file.clone(),
            label_count,
        });
    }
    let rows = source.number("rows", SIDE_MAX)?;
    let columns = source.number("columns", SIDE_MAX)?;
    // Cannot overflow: each factor is bounded above.
    let pixels = count * rows * columns;
    if pixels > PIXELS_MAX {
        return Err(DataError::Implausible {
            file: source.file.clone(),
            offset: 4,
            field: "pixels (images x rows x columns)",
            found: pixels,
            max: PIXELS_MAX,
        });
    }
    let mut features = Vec::new();
    source.payload(pixels, |bytes| {
        features.extend(bytes.iter().map(|&pixel| f32::from(pixel) / 255.0));
    })?;
    Ok(((rows * columns) as usize, features))
}

/// The unpacked bytes of a file, and the number of bytes read so far.
struct IdxSource {
    file: PathBuf,
    reader: Box<dyn Read>,
    offset: u64,
}

impl IdxSource {
    fn open(directory: &Path, name: &'static str) -> Result<IdxSource, DataError> {
        let plain = directory.join(name);
        let packed = directory.join(format!("{name}.gz"));
        if let Some(file) = open_regular(&plain)? {
            return Ok(IdxSource::new(plain, file));
        }
        if let Some(file) = open_regular(&packed)? {
            return Ok(IdxSource::new(packed, MultiGzDecoder::new(file)));
        }
        Err(DataError::NotFound { directory: directory.to_path_buf(), name })
    }

    fn new(file: PathBuf, reader: impl Read + 'static) -> IdxSource {
        IdxSource { file, reader: Box::new(reader), offset: 0 }
    }

    fn magic(&mut self, expected: u32) -> Result<(), DataError> {
        match self.word()? {
            found if found == expected => Ok(()),
            found => Err(DataError::Magic { file: self.file.clone(), found, expected }),
        }
    }

    /// Reads the next number of the header, from 1 to `max`.
    fn number(&mut self, field: &'static str, max: u64) -> Result<u64, DataError> {
        let offset = self.offset;
        match u64::from(self.word()?) {
            found if (1..=max).contains(&found) => Ok(found),
            found => {
                Err(DataError::Implausible { file: self.file.clone(), offset, field, found, max })
            }
        }
    }

    fn word(&mut self) -> Result<u32, DataError> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes, self.offset + 4)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Passes the last `length` bytes of the file to `take` in pieces. Memory grows only with bytes
    /// that exist, and at most one byte more than the header announced is unpacked.
    fn payload(&mut self, length: u64, mut take: impl FnMut(&[u8])) -> Result<(), DataError> {
        let end = self.offset + length;
        let mut piece = vec![0; PIECE];
        while self.offset < end {
            let wanted = (end - self.offset).min(PIECE as u64) as usize;
            self.fill(&mut piece[..wanted], end)?;
            take(&piece[..wanted]);
        }
        // This read also makes the decompressor verify its checksum.
        match self.read(&mut piece[..1])? {
            0 => Ok(()),
            _ => Err(DataError::TrailingBytes { file: self.file.clone(), offset: end }),
        }
    }

    /// Fills `bytes`. `end` is the earliest expected end of the file, for the error.
    fn fill(&mut self, bytes: &mut [u8], end: u64) -> Result<(), DataError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.read(&mut bytes[filled..]) {
                Ok(0) => return Err(self.truncated(end)),
                Ok(count) => {
                    filled += count;
                    self.offset += count as u64;
                }
                Err(DataError::Read { source, .. })
                    if source.kind() == io::ErrorKind::UnexpectedEof =>
                {
                    return Err(self.truncated(end));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn truncated(&self, expected: u64) -> DataError {
        DataError::Truncated { file: self.file.clone(), offset: self.offset, expected }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, DataError> {
        loop {
            match self.reader.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) => return Ok(count),
                Err(source) => {
                    let (file, offset) = (self.file.clone(), self.offset);
                    return Err(DataError::Read { file, offset, source });
                }
            }
        }
    }
}

/// Opens a regular file. Returns `None` if it does not exist.
fn open_regular(file: &Path) -> Result<Option<File>, DataError> {
    let refused = |source| DataError::Read { file: file.to_path_buf(), offset: 0, source };
    match file.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(refused(error)),
        // Opening a pipe would block until a writer opens it.
        Ok(metadata) if !metadata.is_file() => {
            Err(refused(io::Error::other("it is not a regular file")))
        }
        Ok(_) => File::open(file).map(Some).map_err(refused),
    }
}

const IMAGES_MAGIC: u32 = 0x0000_0803;
const LABELS_MAGIC: u32 = 0x0000_0801;

/// Maximum number of images in a file; MNIST has 60,000.
const COUNT_MAX: u64 = 1 << 20;

/// Maximum number of pixels along a side of an image; MNIST has 28.
const SIDE_MAX: u64 = 256;

/// Maximum number of pixels in a file, each four bytes in memory; MNIST has 47 million.
const PIXELS_MAX: u64 = 64 << 20;

/// Number of bytes read at once.
const PIECE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::super::Split;
    use super::*;

    /// Returns a file with these header words and this payload.
    fn idx(header: &[u32], payload: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Returns three images of 2 x 2 pixels.
    fn images() -> Vec<u8> {
        idx(&[IMAGES_MAGIC, 3, 2, 2], &[0, 51, 102, 153, 204, 255, 0, 0, 0, 0, 0, 255])
    }

    fn labels() -> Vec<u8> {
        idx(&[LABELS_MAGIC, 3], &[9, 0, 4])
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn parse(images: Vec<u8>, labels: Vec<u8>) -> Result<Dataset, DataError> {
        let source =
            |name: &str, bytes| IdxSource::new(PathBuf::from(name), io::Cursor::new(bytes));
        pair(source("images", images), source("labels", labels))
    }

    fn refusal(images: Vec<u8>, labels: Vec<u8>) -> String {
        parse(images, labels).unwrap_err().to_string()
    }

    #[test]
    fn a_valid_pair_is_read_completely() {
        let dataset = parse(images(), labels()).unwrap();
        assert_eq!((dataset.width, dataset.classes, dataset.rows()), (4, 10, 3));
        assert_eq!(dataset.labels, [9, 0, 4]);
        assert_eq!(dataset.row(0), [0.0, 0.2, 0.4, 0.6]);
        assert_eq!(dataset.row(2), [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn a_payload_may_be_longer_than_a_piece() {
        let pixels: Vec<u8> = (0..3 * 256 * 256).map(|index| (index % 251) as u8).collect();
        let dataset = parse(idx(&[IMAGES_MAGIC, 3, 256, 256], &pixels), labels()).unwrap();
        let expected = pixels.iter().map(|&pixel| f32::from(pixel) / 255.0);
        assert!(dataset.features.into_iter().eq(expected));
    }

    #[test]
    fn refusals_name_file_offset_and_expectation() {
        let image = |header: &[u32], length| idx(header, &vec![0; length]);
        let table = [
            (
                labels(),
                labels(),
                "cannot load images: it begins with 0x00000801 at offset 0, expected 0x00000803",
            ),
            (
                images(),
                images(),
                "cannot load labels: it begins with 0x00000803 at offset 0, expected 0x00000801",
            ),
            (
                images(),
                idx(&[LABELS_MAGIC, 3], &[9, 10, 4]),
                "cannot load labels: the label at offset 9 is 10, expected less than 10",
            ),
            (
                images(),
                idx(&[LABELS_MAGIC, 2], &[9, 0]),
                "cannot pair images with labels: 3 images and 2 labels at offset 4, expected \
                 equal counts",
            ),
            (
                images(),
                idx(&[LABELS_MAGIC, 2], &[9, 0, 4]),
                "cannot load labels: it continues at offset 10, expected its end there",
            ),
            (
                images(),
                idx(&[LABELS_MAGIC, u32::MAX], &[9, 0, 4]),
                "cannot load labels: the number of labels at offset 4 is 4294967295, expected 1 \
                 to 1048576",
            ),
            (
                images(),
                idx(&[LABELS_MAGIC, 0], &[]),
                "cannot load labels: the number of labels at offset 4 is 0, expected 1 to 1048576",
            ),
            (
                image(&[IMAGES_MAGIC, 3, 257, 2], 12),
                labels(),
                "cannot load images: the number of rows at offset 8 is 257, expected 1 to 256",
            ),
            (
                image(&[IMAGES_MAGIC, 3, 2, 0], 12),
                labels(),
                "cannot load images: the number of columns at offset 12 is 0, expected 1 to 256",
            ),
            (
                image(&[IMAGES_MAGIC, 1025, 256, 256], 12),
                idx(&[LABELS_MAGIC, 1025], &[1; 1025]),
                "cannot load images: the number of pixels (images x rows x columns) at offset 4 is \
                 67174400, expected 1 to 67108864",
            ),
            (
                image(&[IMAGES_MAGIC, 1024, 256, 256], 12),
                idx(&[LABELS_MAGIC, 1024], &[1; 1024]),
                "cannot load images: it ends at offset 28, expected 67108880 bytes",
            ),
        ];
        for (images, labels, expected) in table {
            assert_eq!(refusal(images, labels), expected);
        }
    }

    #[test]
    fn every_truncation_is_reported() {
        for length in 0..images().len() {
            let error = parse(images()[..length].to_vec(), labels());
            let Err(DataError::Truncated { offset, .. }) = error else { panic!("{error:?}") };
            assert_eq!(offset, length as u64);
        }
        for length in 0..labels().len() {
            let error = parse(images(), labels()[..length].to_vec());
            assert!(matches!(error, Err(DataError::Truncated { .. })), "{error:?}");
        }
    }

    #[test]
    fn broken_bytes_never_panic() {
        for position in 0..images().len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut broken = images();
                broken[position] = value;
                let _ = parse(broken, labels());
                let mut broken = gzip(&images());
                let position = position % broken.len();
                broken[position] = value;
                let _ = parse(broken, labels());
            }
        }
    }

    fn write_all(directory: &Path, suffix: &str, pack: impl Fn(&[u8]) -> Vec<u8>) {
        for part in ["train", "t10k"] {
            let name = |kind: &str| directory.join(format!("{part}-{kind}-ubyte{suffix}"));
            fs::write(name("images-idx3"), pack(&images())).unwrap();
            fs::write(name("labels-idx1"), pack(&labels())).unwrap();
        }
    }

    #[test]
    fn plain_and_packed_files_give_the_same_dataset() {
        let plain = tempfile::tempdir().unwrap();
        let packed = tempfile::tempdir().unwrap();
        write_all(plain.path(), "", <[u8]>::to_vec);
        write_all(packed.path(), ".gz", gzip);
        let split = Split::open(plain.path()).unwrap();
        assert_eq!(split, Split::open(packed.path()).unwrap());
        assert_eq!(split.train, parse(images(), labels()).unwrap());
    }

    #[test]
    fn broken_archives_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("train-images-idx3-ubyte.gz");
        let open = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            Split::open(directory.path()).unwrap_err()
        };
        write_all(directory.path(), ".gz", gzip);
        let whole = gzip(&images());
        for length in 0..whole.len() {
            let error = open(&whole[..length]);
            assert!(
                matches!(error, DataError::Truncated { .. } | DataError::Read { .. }),
                "{length}: {error:?}"
            );
        }
        let mut wrong_checksum = whole.clone();
        let checksum = whole.len() - 8;
        wrong_checksum[checksum] ^= 1;
        assert!(matches!(open(&wrong_checksum), DataError::Read { offset: 28, .. }));
        // An archive that unpacks to far more than its header announces is abandoned after one more
        // byte.
        let bomb = gzip(&[images(), vec![0; 16 << 20]].concat());
        assert!(matches!(open(&bomb), DataError::TrailingBytes { offset: 28, .. }));
    }

    #[test]
    fn absent_files_and_unequal_sizes_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let error = Split::open(directory.path()).unwrap_err().to_string();
        let expected = "cannot find train-images-idx3-ubyte or train-images-idx3-ubyte.gz in ";
        assert!(error.starts_with(expected), "{error}");

        write_all(directory.path(), "", <[u8]>::to_vec);
        let test = directory.path().join("t10k-images-idx3-ubyte");
        fs::write(&test, idx(&[IMAGES_MAGIC, 3, 1, 2], &[0; 6])).unwrap();
        let error = Split::open(directory.path()).unwrap_err();
        assert!(matches!(error, DataError::WidthMismatch { train: 4, test: 2, .. }));

        fs::remove_file(&test).unwrap();
        fs::create_dir(&test).unwrap();
        let error = Split::open(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with("at offset 0: it is not a regular file"), "{error}");
    }
}
